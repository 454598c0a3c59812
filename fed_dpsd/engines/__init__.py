"""Engines, which host the clients of a run.

local.py hosts simulated clients in this process. flower/ reaches clients through Flower, in a
simulation (simulation.py) or a deployment. clients.py opens simulated clients, placement.py places
them on GPUs, and ready.py and doctor.py check a run before it starts.
"""
