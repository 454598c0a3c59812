"""Attacks on what clients run, and the lower bounds on epsilon that they give."""
