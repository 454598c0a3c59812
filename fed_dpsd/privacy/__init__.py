"""Mechanisms, private training, their events and the accounting of these events.

Knows arrays and numbers: no file, data set, client or message. Reads a configuration only to name
its problems (`check`, `warnings`). Imports no other room but losses.py. A noise and its event come
from one frozen object (mechanism.py, training.py); accounting.py turns events into epsilons, and
events.py alone makes one of the library's accountants.
"""
