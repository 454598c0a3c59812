"""Audits of client code: lower bounds on epsilon, and checks of draws and charges."""
