"""The Flower ClientApp."""

from fed_dpsd.engines.flower.client import app

__all__ = ["app"]
