"""Students as ONNX files, written by torch and read by onnxruntime; an extra installs both.

A file maps `images`, (B, C, S, S) float32 in [0, 1], to `probabilities`, (B, K) float32, for any B.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.errors import UserError
from fed_dpsd.models.inference import batches
from fed_dpsd.server.program_file import program_of

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def require(packages: tuple[str, ...] = PACKAGES) -> None:
    """Check that the packages of the extra are installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UserError(f"ONNX needs {' and '.join(missing)}; run pip install 'fed-dpsd[onnx]'")


class OnnxModel:
    """The network of an ONNX file.

    Raises:
        UserError: onnxruntime is not installed.
        ValueError: onnxruntime cannot run the content as an ONNX file.
    """

    def __init__(self, content: Path | bytes) -> None:
        require(("onnxruntime",))
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are reported here, not by the library
        source = content if isinstance(content, bytes) else content.read_bytes()
        try:
            self._session = onnxruntime.InferenceSession(
                source, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors have no common base class
            raise ValueError(f"onnxruntime cannot run it: {type(error).__name__}") from None

    @property
    def metadata(self) -> dict[str, str]:
        """Return the file's metadata."""
        return dict(self._session.get_modelmeta().custom_metadata_map)

    def predict(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the (B, K) probabilities of (B, C, S, S) uint8 images."""
        parts = [
            self._session.run(["probabilities"], {"images": batch.contiguous().numpy()})[0]
            for batch in batches(images, torch.device("cpu"))
        ]
        return np.concatenate(parts)


def to_onnx(model: nn.Module, shape: tuple[int, ...], metadata: Mapping[str, str]) -> bytes:
    """Return an ONNX file of a network from (B, C, S, S) images; `shape` is (C, S, S)."""
    program = torch.onnx.export(
        program_of(model, shape),
        input_names=["images"],
        output_names=["probabilities"],
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(metadata)
    return program.model_proto.SerializeToString()
