"""Sweeps: grids of runs, resumed and tabulated."""
