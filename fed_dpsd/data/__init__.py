"""Data sets: from files to arrays, and their partition among simulated clients.

PRIVATE: may know the records of the simulation or hospital that calls it, and handles each by
itself (intake.py). A coordinator reads its test images here. Knows no model, mechanism, method or
message, and sends nothing.
"""
