"""Measure FENS: teachers that are kept, and an aggregator trained over them.

Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma: "Revisiting Ensembling in
One-Shot Federated Learning", NeurIPS 2024, arXiv 2411.07182. Each client trains a teacher on nine
tenths of its records. Then a network of one hidden layer maps all teachers' logits to classes; the
clients train it by FedAdam on their other records. Settings are from the authors' script
(github.com/sacs-epfl/fens, scripts/train_aggregator.sh). Teachers, data and partitions are this
library's. The weights of teachers and aggregators leave the clients without noise: epsilon inf.

    python benchmarks/fens.py fens.csv --seeds 0,1,2 -- data=mnist data.path=FOLDER

The words after `--` are overrides of `fed-dpsd run`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fed_dpsd.client.learning import train
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.data.intake import Records
from fed_dpsd.experiment import load_data, one_run, partitions
from fed_dpsd.models import initialise, torch_threads
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.inference import batches
from fed_dpsd.server.run_folder import versions
from fed_dpsd.streams import Streams

CPU = torch.device("cpu")
KEPT = 10  # one of so many records is for the aggregator
ROUNDS, BATCH, CLIENT_RATE, SERVER_RATE, HIDDEN = 500, 128, 1.0, 0.001, 2
BETAS, EPSILON = (0.9, 0.99), 1e-3  # of FedAdam, without correction of the bias


def main() -> None:
    """Measure each seed, and write the CSV after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    words = sys.argv[1:]
    end = words.index("--")
    options, overrides = parser.parse_args(words[:end]), words[end + 1 :]
    rows: list[dict[str, Any]] = []
    for seed in options.seeds.split(","):
        rows.append(measure([*overrides, f"seed={seed}"]))
        print(rows[-1])
        pandas.DataFrame(rows).to_csv(options.csv, index=False, lineterminator="\n")


def measure(overrides: Sequence[str]) -> dict[str, Any]:
    """Return one row: accuracies on the test split after the last round."""
    experiment = one_run(overrides, Path.cwd())
    config = experiment.config
    data, streams = load_data(config.data, config.cache), Streams(config.seed)
    teachers, kept = [], []
    with torch_threads(config.threads_client):
        for client, part in enumerate(partitions(experiment)):
            order = streams.numpy("fens split", client).permutation(part)
            size = len(order) // KEPT
            kept.append(data.train.take(np.sort(order[:size])))
            teacher = make_teacher(config, client, 0)
            draws = streams.torch("fens batches", client)
            train(teacher, data.train.take(np.sort(order[size:])), config, draws)
            teachers.append(teacher.eval())
        inputs = [logits(teachers, each) for each in kept]
        aggregator = aggregate(inputs, [each.labels for each in kept], streams)
        test = logits(teachers, data.test)
        with torch.no_grad():
            together = aggregator(test)
    each = test.view(len(test), len(teachers), -1)
    hits = {
        "student": together,
        "mean_logits": each.mean(1),
        "mean_probabilities": each.softmax(2).mean(1),
    }
    accuracy = {
        name: float((scores.argmax(1).numpy() == data.test.labels).mean())
        for name, scores in hits.items()
    }
    found = versions()
    words = [word for word in overrides if not word.startswith(("data.path", "seed", "cache"))]
    return {
        "method": "fens",
        "overrides": " ".join(words),
        "seed": config.seed,
        **accuracy,
        "commit": found["commit"],
        "machine": found["machine"],
    }


@torch.no_grad()
def logits(teachers: Sequence[Classifier], records: Records) -> torch.Tensor:
    """Return the (N, n * K) logits of n teachers."""
    parts = batches(records.images, CPU)
    return torch.cat([torch.cat([teacher(part) for teacher in teachers], 1) for part in parts])


def aggregate(
    inputs: Sequence[torch.Tensor], labels: Sequence[NDArray[np.int64]], streams: Streams
) -> nn.Module:
    """Train the aggregator by FedAdam: each client takes one step of SGD a round."""
    width = inputs[0].shape[1]
    clients = len(inputs)
    classes, hidden = width // clients, clients * HIDDEN
    model = initialise(
        lambda: nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes)),
        streams.torch("fens aggregator"),
    )
    shares = np.array([len(own) for own in labels]) / sum(len(own) for own in labels)
    draws = [streams.numpy("fens steps", client) for client in range(clients)]
    parameters = list(model.parameters())
    moments = [[torch.zeros_like(each), torch.zeros_like(each)] for each in parameters]
    for _ in range(ROUNDS):
        # One step from the common weights, so the mean change follows from the mean gradient.
        change = [torch.zeros_like(each) for each in parameters]
        for own, classes_of, share, draw in zip(inputs, labels, shares, draws, strict=True):
            chosen = draw.choice(len(own), min(BATCH, len(own)), replace=False)
            target = torch.from_numpy(classes_of[chosen])
            loss = functional.cross_entropy(model(own[chosen]), target)
            gradients = torch.autograd.grad(loss, parameters)
            for total, gradient in zip(change, gradients, strict=True):
                total -= float(share) * CLIENT_RATE * gradient
        with torch.no_grad():
            for each, step, (first, second) in zip(parameters, change, moments, strict=True):
                first.lerp_(step, 1 - BETAS[0])
                second.lerp_(step**2, 1 - BETAS[1])
                each.add_(first / (second.sqrt() + EPSILON), alpha=SERVER_RATE)
    return model


if __name__ == "__main__":
    main()
