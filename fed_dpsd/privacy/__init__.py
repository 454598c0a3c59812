"""Mechanisms, their events and their accounting; this room imports losses.py alone."""
