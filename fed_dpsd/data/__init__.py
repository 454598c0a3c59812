"""Data sets, and their partition among simulated clients."""
