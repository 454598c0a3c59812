"""What sweeps measured, for people: a table of means over seeds, and a figure."""
