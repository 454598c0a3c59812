"""The Flower ServerApp."""

from fed_dpsd.engines.flower.server import app

__all__ = ["app"]
