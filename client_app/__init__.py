"""The Flower ClientApp, which hands each message to the library."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fed_dpsd.flower import client

app = ClientApp()


@app.query("answer")
def answer(message: Message, context: Context) -> Message:
    """Answer an ask for every client that this node hosts."""
    return client.answer(message, context, Path(__file__))


@app.query("diagnose")
def diagnose(message: Message, context: Context) -> Message:
    """Return exact diagnostics of a simulation."""
    return client.answer(message, context, Path(__file__))


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Name the client of a hospital's node."""
    return client.answer(message, context, Path(__file__))


@app.query("step")
def step(message: Message, context: Context) -> Message:
    """Take part in a secure sum."""
    return client.answer(message, context, Path(__file__))
