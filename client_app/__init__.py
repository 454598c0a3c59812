"""The Flower ClientApp; in a simulation it loads after the ServerApp's first checks."""

from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fed_dpsd.engines.flower import gate, import_ray, quieten


def later() -> ClientApp:
    """Return an app that only a simulation's client processes import, with their first message."""

    class Later(ClientApp):  # local, so that Ray sends it whole and not its name
        def __call__(self, message: Message, context: Context) -> Message:
            from fed_dpsd.engines.flower.client import app

            if message.metadata.message_type == gate.WAKE:
                return Message(RecordDict(), reply_to=message)
            return app(message, context)

    return Later()


def place(experiment: Any, nodes: int) -> str:
    """Place a simulation's clients; fail here if a client process could not import its app."""
    from fed_dpsd.engines.flower import shares
    from fed_dpsd.engines.flower.client import app  # noqa: F401

    return shares.place_clients(experiment, nodes)


if not gate.in_simulation():
    from fed_dpsd.engines.flower.client import app
elif gate.wait_until_needed(place):
    import_ray()
    app = later()
else:
    quieten()  # Flower starts Ray after a failure too
    app = ClientApp()  # which ends sooner

__all__ = ["app"]
