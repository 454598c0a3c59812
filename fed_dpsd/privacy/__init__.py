"""Mechanisms, their events and their accounting; this room imports no other room."""
