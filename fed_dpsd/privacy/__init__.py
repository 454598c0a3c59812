"""Mechanisms, their events and their accounting; imports no other room."""
