"""Engines, which host the clients of a run and carry messages between the two sides.

Knows BOTH SIDES as a carrier: answers come from `Site` and `Hospital` (client/), and go to the
federation (server/) unchanged. local.py hosts simulated clients in this process. flower/ reaches
clients through Flower, in a simulation (simulation.py) or a deployment. clients.py opens simulated
clients, placement.py places them on GPUs, and ready.py and doctor.py check a run before it starts.
"""
