"""Audits of what clients run: lower bounds on epsilon, tests of samplers and of the protocol."""
