"""Rehearsals of deployments: a coordinator and hospitals on one machine."""
