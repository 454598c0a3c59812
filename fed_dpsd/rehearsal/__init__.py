"""Rehearsals of deployments: a coordinator and hospitals on one machine.

Knows BOTH SIDES while it prepares them: it writes the hospitals' records, keys and site files, and
then starts the processes of a deployment. Only the command line imports it.
"""
