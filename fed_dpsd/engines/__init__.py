"""Federations on this machine: simulated clients, sweeps of runs, and rehearsed deployments.

A simulation hosts all clients in this process (local.py) or in a Flower simulation (superlink.py).
A rehearsal runs a whole deployment on this machine (rehearsal.py), on request with faults
(faults.py).
"""
