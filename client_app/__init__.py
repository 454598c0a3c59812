"""The Flower ClientApp: hands each message to the library."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fed_dpsd.runtime import flower

app = ClientApp()


@app.query("answer")
def answer(message: Message, context: Context) -> Message:
    """Answer an ask for every client that this node hosts."""
    return flower.answer(message, context, Path(__file__))


@app.query("diagnose")
def diagnose(message: Message, context: Context) -> Message:
    """Exact diagnostics of a simulation."""
    return flower.answer(message, context, Path(__file__))
