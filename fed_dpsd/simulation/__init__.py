"""Simulated clients and whole federations on this machine: one process, Flower, sweeps, rehearsals."""
