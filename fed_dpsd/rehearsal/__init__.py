"""Rehearsed deployments: a coordinator and hospitals on one machine, and their faults."""
