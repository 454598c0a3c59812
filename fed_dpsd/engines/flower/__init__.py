"""Flower as an engine: the only files of the library that import Flower."""
