"""Data sets and how they are split among simulated clients."""
