"""The Flower ServerApp."""

from fed_dpsd.engines.flower import gate

try:
    from fed_dpsd.engines.flower.server import app
except Exception as error:  # otherwise Flower would drop it, and the ClientApp wait
    app = gate.failing_app(error)

__all__ = ["app"]
