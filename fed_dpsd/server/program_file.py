"""Students as programs of torch.export, which PyTorch runs without FedDPSD's code.

A file maps (B, C, S, S) float32 images in [0, 1] to (B, K) float32 probabilities, for any B.
"""

import io
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.models.inference import batches


def program_of(model: nn.Module, shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    """Return the program of a network and a softmax; images have shape (B, *shape), for any B."""
    images = torch.zeros((2, *shape))
    model(images)  # fixed features compute their constants here, so the constants are not traced
    return torch.export.export(
        nn.Sequential(model, nn.Softmax(dim=1)).eval(),
        (images,),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )


def to_pt2(model: nn.Module, shape: tuple[int, ...], metadata: Mapping[str, str]) -> bytes:
    """Return the file of a network from (B, C, S, S) images; `shape` is (C, S, S)."""
    program, content = program_of(model, shape), io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # weights are not contiguous: channels last
        torch.export.save(program, content, extra_files=dict(metadata))
    return content.getvalue()


def predictor(content: bytes) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """Return a function from (B, C, S, S) uint8 images to the (B, K) probabilities of a file.

    Only for a file that `to_pt2` has just written: loading one runs what it says.
    """
    module = torch.export.load(io.BytesIO(content)).module()

    def probabilities(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        cpu = torch.device("cpu")
        with torch.inference_mode():
            parts = [module(batch.contiguous()).numpy() for batch in batches(images, cpu)]
        return np.concatenate(parts)

    return probabilities
