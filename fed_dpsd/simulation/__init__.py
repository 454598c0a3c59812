"""Simulated clients and federations on this machine: one process, Flower, sweeps, rehearsals."""
