"""The Flower ClientApp."""

from fed_dpsd.engines.flower import quieten
from fed_dpsd.engines.flower.client import app

quieten()  # Flower starts Ray after it has loaded the ClientApp

__all__ = ["app"]
