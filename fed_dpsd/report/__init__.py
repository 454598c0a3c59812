"""What sweeps measured, for people: tables of means over seeds, and figures."""
