"""The Flower ClientApp; in a simulation it loads after the ServerApp's first checks."""

from flwr.clientapp import ClientApp

from fed_dpsd.engines.flower import gate

app = ClientApp()
if gate.is_needed():  # otherwise the run has failed, and ends sooner without loading torch
    with gate.reporting():
        from fed_dpsd.engines.flower import shares
        from fed_dpsd.engines.flower.client import app

        gate.answer(shares.place_clients)

__all__ = ["app"]
