"""Plain Flower FedAvg as a baseline: a lean Flower app in one file, without privacy (epsilon inf).

Flower's own strategy averages; a client takes steps on its own records, which it reads once. Only
the networks and the random streams come from this library. The folder that row.py prepares has
settings.json, test.npz and a file per client.
"""

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.inference import IMAGES_AT_ONCE, learner
from fed_dpsd.storage import client_name
from fed_dpsd.streams import Streams

client_app = ClientApp()
server_app = ServerApp()
PURPOSE = "plain FedAvg"
FOLDER = "FED_DPSD_BENCH_FOLDER"  # the environment variable that names the folder


@functools.cache
def read(folder: str, name: str) -> tuple[nn.Module, Callable[[Any], torch.Tensor], torch.Tensor]:
    """Return a network's learning part, a function from indices to its inputs, and the labels."""
    settings = read_settings(folder)
    torch.set_num_threads(settings["threads_server" if name == "test" else "threads_client"])
    build = CLASSIFIERS[settings["architecture"]]
    sizes = tuple(settings["shape"]), settings["num_classes"], settings["width"]
    network = initialise(lambda: build(*sizes), Streams(settings["seed"]).torch(PURPOSE))
    with np.load(Path(folder) / f"{name}.npz") as records:
        model, take = learner(network, records["images"], torch.device("cpu"))
        return model, take, torch.from_numpy(records["labels"])


@functools.cache
def read_settings(folder: str) -> dict[str, Any]:
    """Return the content of settings.json."""
    return dict(json.loads((Path(folder) / "settings.json").read_text()))


@client_app.query()
def begin(message: Message, context: Context) -> Message:
    """Read the client's records before the first round, as FedDPSD's clients do."""
    read(os.environ[FOLDER], client_name(int(context.node_config["partition-id"])))
    return Message(RecordDict(), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train for a round from the average.

    It takes as many images as its teachers would answer or, if the method is FedAVG, its epochs.
    """
    folder, client = os.environ[FOLDER], int(context.node_config["partition-id"])
    settings = read_settings(folder)
    model, take, labels = read(folder, client_name(client))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rate, momentum = settings["learning_rate"], settings["momentum"]
    if momentum is None:
        optimiser: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), rate, foreach=True)
    else:
        optimiser = torch.optim.SGD(model.parameters(), rate, momentum, foreach=True)
    number = int(message.content["config"]["server-round"])
    rng = Streams(settings["seed"]).torch(PURPOSE, client, number)
    model.train()
    if settings["epochs"]:
        orders = [torch.randperm(len(labels), generator=rng) for _ in range(settings["epochs"])]
        images = torch.cat(orders)
    else:
        images = torch.randint(len(labels), (settings["images_per_round"],), generator=rng)
    for chosen in images.split(settings["batch_size"]):
        loss = nn.functional.cross_entropy(model(take(chosen)), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Average for all rounds; write the folder's summary.json."""
    begun, folder = time.time(), os.environ[FOLDER]
    settings = read_settings(folder)
    model, take, labels = read(folder, "test")
    clients, rounds = settings["num_clients"], settings["rounds"]
    grid.pull_interval = 0.005  # as in FedDPSD; the default of 0.1 s would delay rounds
    started = time.perf_counter()
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.1)
    hellos = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
    replies = list(grid.send_and_receive(hellos))
    started, ready = time.perf_counter(), time.perf_counter() - started
    accuracy = 0.0

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        nonlocal accuracy
        if number and (number % settings["evaluate_every"] == 0 or number == rounds):
            model.load_state_dict(arrays.to_torch_state_dict())
            accuracy = score(model, take, labels)

    first = ArrayRecord(model.state_dict())
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    trained = strategy.start(grid, first, num_rounds=rounds, evaluate_fn=evaluate)
    seconds = time.perf_counter() - started
    failed = any(reply.has_error() for reply in replies)
    if failed or len(trained.train_metrics_clientapp) < rounds:
        raise RuntimeError("a client of plain FedAvg failed")  # Flower continues without it
    travelled = clients * rounds * sum(array.numpy().nbytes for array in first.values())
    passes = clients * rounds * settings["images_per_round"]
    summary = {
        "begun": begun,
        "accuracy": {"student": accuracy, "ensemble": None},
        "queries": {
            "answered": rounds * settings["queries_per_round"],
            "forward_answers": passes,
            "backward_answers": passes,
            "bytes_to_clients": travelled,
            "bytes_to_server": travelled,
        },
        "seconds": {"teachers": ready, "rounds": seconds},
        "student_sha256": None,
    }
    (Path(folder) / "summary.json").write_text(json.dumps(summary))


@torch.inference_mode()
def score(model: nn.Module, take: Callable[[Any], torch.Tensor], labels: torch.Tensor) -> float:
    """Return a network's accuracy on the test split."""
    model.eval()
    parts = torch.arange(len(labels)).split(IMAGES_AT_ONCE)
    right = [(model(take(part)).argmax(1) == labels[part]).sum() for part in parts]
    return float(sum(right) / len(labels))
