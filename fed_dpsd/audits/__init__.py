"""Audits of client code: lower bounds on epsilon, tests of samplers and of the protocol."""
