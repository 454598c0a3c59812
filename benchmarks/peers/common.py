"""What the scripts of other simulators share: data, network, score and result.

A script runs in the environment of its simulator, as `python NAME.py FOLDER`, and this file imports
only NumPy and torch. bench.py writes FOLDER/settings.json and FOLDER/data.npz; the script adds
FOLDER/result.json.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

VARIABLE = "FED_DPSD_BENCH_FOLDER"  # names the folder in processes that a script starts
FOLDER = Path(os.environ.get(VARIABLE) or sys.argv[1])


class Network(nn.Sequential):
    """The architecture `cnn` of this library, with the same weights' law and memory layout."""

    def __init__(self, channels: int, side: int, classes: int, width: int) -> None:
        super().__init__(
            *(nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, classes)),
        )
        for weights in self.parameters():
            if weights.dim() > 1:
                nn.init.xavier_uniform_(weights)
            else:
                nn.init.zeros_(weights)
        self.to(memory_format=torch.channels_last)  # twice as fast on CPUs

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) images in [0, 1] to (B, K) logits."""
        return super().forward(2 * images - 1)


class Task:
    """The task of a folder.

    Attributes:
        settings: rounds, epochs, batch_size, learning_rate, seed, and the arguments of
            `Network` as `network`.
        clients: each client's (n, C, S, S) images in [0, 1] and (n,) labels.
        test: the same for the test split.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self.settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
        torch.set_num_threads(1)
        torch.manual_seed(self.settings["seed"])
        np.random.seed(self.settings["seed"])  # noqa: NPY002 - simulators draw from it
        with np.load(folder / "data.npz") as data:
            images, labels = _unit(data["images"]), torch.from_numpy(data["labels"])
            sizes = data["sizes"].tolist()
            self.test = _unit(data["test_images"]), torch.from_numpy(data["test_labels"])
        self.clients = list(zip(images.split(sizes), labels.split(sizes), strict=True))

    def network(self) -> Network:
        """Return a new network."""
        return Network(**self.settings["network"])

    @torch.inference_mode()
    def accuracy(self, network: nn.Module) -> float:
        """Return a network's accuracy on the test split."""
        network.eval()
        parts = zip(*(tensor.split(128) for tensor in self.test), strict=True)
        right = [(network(images).argmax(1) == labels).sum() for images, labels in parts]
        return float(sum(right) / len(self.test[1]))

    def finish(self, network: nn.Module, began: float) -> None:
        """Score the network and write the result; `began` is the time of the first round."""
        result = {"rounds_seconds": time.time() - began, "accuracy": self.accuracy(network)}
        (FOLDER / "result.json").write_text(json.dumps(result))


@functools.cache
def task() -> Task:
    """Return the task of this process, which reads its data once."""
    return Task()


def _unit(images: Any) -> torch.Tensor:
    return torch.from_numpy(images).float().div_(255).contiguous(memory_format=torch.channels_last)
