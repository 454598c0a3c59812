"""Mechanisms, private training, their events and the accounting of these events.

Knows arrays and numbers: no file, data set, client, message or configuration. Imports no other room
but losses.py. A noise and its event come from one frozen object (mechanism.py, training.py);
accounting.py turns events into epsilons, and laws.py alone makes accountants.
"""
