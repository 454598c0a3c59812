"""Sweeps: grids of runs, resumed and tabulated.

Knows configurations, run folders, digests of a simulation's data, and charges, which it reads from
ledgers for a report. Knows no site and no teacher.
"""
