"""Flower as an engine: the only library files that import Flower."""
