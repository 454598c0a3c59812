"""Audits and attacks: lower bounds on epsilon, and checks of draws and charges.

Knows BOTH SIDES: audits build hospitals on records that they make themselves, and attacks read the
records and teachers of simulated runs. So only the command line imports this room, and no
deployment uses it.
"""
