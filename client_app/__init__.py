"""The Flower ClientApp, which hands each message to the library."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fed_dpsd.engines.flower import client

app = ClientApp()


def answer(message: Message, context: Context) -> Message:
    """Answer for every client that this node hosts."""
    return client.answer(message, context, Path(__file__))


# A request; exact diagnostics of a simulation; which client a hospital's node is; a secure sum's
# step.
for kind in ("answer", "diagnose", "hello", "step"):
    app.query(kind)(answer)
