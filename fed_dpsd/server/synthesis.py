"""Synthetic images of a completed run, drawn like the run's own images, and their parquet file.

Nothing private is used: generators and students are computed from what clients released.
"""

import dataclasses
import hashlib
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from PIL import Image

from fed_dpsd.errors import UserError
from fed_dpsd.methods.dpsd import DPSD
from fed_dpsd.methods.fed_dpsd import FedDPSD
from fed_dpsd.methods.method import Method, PublicContext, tensors_of
from fed_dpsd.models import procedural, torch_threads
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.inference import to_bytes
from fed_dpsd.models.pictures import Pictures
from fed_dpsd.progress import reporting
from fed_dpsd.server.cards import cards_in, dataset_card, privacy_card_of
from fed_dpsd.server.completed import student_of
from fed_dpsd.server.run_folder import CompletedRun, open_completed
from fed_dpsd.server.student import Student
from fed_dpsd.storage import to_utf8, write_together
from fed_dpsd.streams import Streams

Source = Literal["generator", "queries"]
CARDS = ("privacy_card.json", "PRIVACY.md", "README.md")
PURPOSE = "images after the run"  # of random streams; no method uses this name
ROWS_AT_ONCE = 1_000  # rows of a group in the parquet file; readers load a group at once


class Synthetic(NamedTuple):
    """A file of synthetic images, and a sentence on how they were drawn."""

    path: Path
    origin: str


def synthesize(
    run_folder: Path,
    number: int,
    path: Path,
    labels: bool = False,
    source: Source | None = None,
    seed: int = 0,
) -> Synthetic:
    """Write a parquet file of synthetic images in the hub's layout, and its cards.

    Raises:
        UserError: an argument is not valid, the run has no such images, or a file exists.
    """
    for name, value, least in (("number", number, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise UserError(f"{name}={value!r} must be an integer >= {least}")
    if source not in (None, *get_args(Source)):
        raise UserError(f"source={source!r} must be {' or '.join(get_args(Source))}")
    number, seed = int(number), int(seed)  # NumPy's would not fit into JSON
    _check_place(path)
    run = open_completed(run_folder)
    student = student_of(run)
    with torch_threads(run.experiment.config.threads_server):
        images, origin = draw_images(run, student, number, source, seed)
        scores = student.predict(images) if labels else None
    buffer = io.BytesIO()
    table = table_of(images, scores, student.classes)
    pyarrow.parquet.write_table(table, buffer, row_group_size=ROWS_AT_ONCE)
    content = buffer.getvalue()
    card = {
        "artefact": f"{number:,} synthetic images in {path.name}",
        **privacy_card_of(run),
        "origin": origin,
        "seed": seed,
        "files": {path.name: {"sha256": hashlib.sha256(content).hexdigest()}},
    }
    text = dataset_card(run, path.name, number, origin, labels, card)
    readme = {path.parent / "README.md": to_utf8(text)}
    write_together(cards_in(path.parent, card) | readme | {path: content})
    return Synthetic(path, origin)


def _check_place(path: Path) -> None:
    if path.suffix != ".parquet":
        raise UserError(f"{path}: give a name that ends in .parquet")
    for each in (path, *(path.parent / name for name in CARDS)):
        if each.exists():
            raise UserError(
                f"{each} already exists; choose another folder, as the images' cards are "
                "written there too"
            )


# --- drawing -------------------------------------------------------------------------------------


def draw_images(
    run: CompletedRun, student: Student[Classifier], number: int, source: Source | None, seed: int
) -> tuple[NDArray[np.uint8], str]:
    """Draw (N, C, S, S) uint8 images of a run; also return a sentence on how they were drawn."""
    method, name = run.experiment.method, run.summary["method"]
    config = dataclasses.replace(run.experiment.config, server_device="cpu")
    context = dataclasses.replace(run.experiment, config=config).public
    kept = tensors_of("generator", run.state.tensors)
    ours = method if isinstance(method, FedDPSD) else None
    makes = ours and ours.mixture(context.queries_per_round)["generated"]
    if source is None:
        source = "generator" if kept or makes else "queries"
    streams = Streams(seed)
    if source == "generator" and kept:
        parts = _from_kept_generator(context, method, kept, run, streams)
        origin = "The run's generator, as of the last round, drew them from new latent vectors"
        origin += "." if _is_trained(method) else "; it was never trained."
    elif source == "generator" and ours and makes:
        parts = _from_new_generators(ours, student.model, context, run, streams)
        origin = _origin_of_new_generators(ours)
    elif source == "generator":
        raise UserError(
            f"{run.folder}: this run of method {name} keeps no generator; choose queries, "
            "the images that it sent"
        )
    elif ours:
        parts = _from_next_rounds(ours, student.model, context, run, streams, kept)
        origin = "They are the queries that the run's next rounds would have sent."
    else:
        origin = "They are among the images that the run sent."
        return _from_buffer(run, number, streams), origin
    return _take(parts, number), origin


def _take(parts: Iterator[NDArray[np.uint8]], number: int) -> NDArray[np.uint8]:
    taken: list[NDArray[np.uint8]] = []
    with reporting("images drawn", number) as task:
        while (missing := number - sum(map(len, taken))) > 0:
            taken.append(next(parts)[:missing])
            task.advance(len(taken[-1]))
    return np.concatenate(taken)


def _from_kept_generator(
    context: PublicContext,
    method: Method,
    weights: dict[str, torch.Tensor],
    run: CompletedRun,
    streams: Streams,
) -> Iterator[NDArray[np.uint8]]:
    """Yield batches as large as in the run, because the generator normalises over a batch."""
    rng = streams.torch(PURPOSE)
    size, polarity = context.queries_per_round, None
    if isinstance(method, FedDPSD):
        size, polarity = method.images_per_generator, method.infer_polarity(list(run.state.buffer))
    generator = _generator(context, method, weights)
    generator.train()
    while True:
        latents = torch.randn((size, generator.project.in_features), generator=rng)
        with torch.no_grad():
            images = to_bytes(generator(latents))
        yield procedural.apply_polarity(images, polarity) if polarity else images


def _generator(
    context: PublicContext, method: Method, weights: dict[str, torch.Tensor]
) -> Generator:
    generator = context.make_generator(vars(method)["latent_size"], torch.Generator())
    generator.load_state_dict(weights)
    return generator


def _is_trained(method: Method) -> bool:
    """Return whether a method's settings train the generator that it keeps."""
    steps = [getattr(method, f"{kind}_steps", None) for kind in ("generator", "pretraining")]
    return getattr(method, "generator_learning_rate", 0) > 0 and steps not in ([0, None], [0, 0])


def _from_new_generators(
    method: FedDPSD, model: Classifier, context: PublicContext, run: CompletedRun, streams: Streams
) -> Iterator[NDArray[np.uint8]]:
    """Yield a batch from each new generator, trained like the run's generators."""
    rng, polarity = streams.torch(PURPOSE), method.infer_polarity(list(run.state.buffer))
    while True:
        images = method.generate(model, context, method.images_per_generator, rng)
        yield procedural.apply_polarity(to_bytes(images), polarity)


def _origin_of_new_generators(method: FedDPSD) -> str:
    trained = isinstance(method, DPSD) and method.discriminator == "teacher"
    instead = " instead of the teacher, which the run does not keep" if trained else ""
    return (
        f"New generators drew them, {method.images_per_generator} each, after "
        f"{method.generator_steps} steps against the student{instead}."
    )


def _from_next_rounds(
    method: FedDPSD,
    model: Classifier,
    context: PublicContext,
    run: CompletedRun,
    streams: Streams,
    weights: dict[str, torch.Tensor],
) -> Iterator[NDArray[np.uint8]]:
    """Yield the images of rounds after the last one, in random order within a round."""
    buffer = list(run.state.buffer)
    kept = _generator(context, method, weights) if weights else None
    for number in itertools.count(context.rounds + 1):
        images = method.draw(model, context, streams, number, buffer, kept)
        images = procedural.apply_polarity(images, method.infer_polarity(buffer))
        yield images[streams.numpy(PURPOSE, query_id=number).permutation(len(images))]


def _from_buffer(run: CompletedRun, number: int, streams: Streams) -> NDArray[np.uint8]:
    sent = [part.images for part in run.state.buffer]
    if not sent:
        raise UserError(
            f"{run.folder}: method {run.summary['method']} neither keeps a generator nor sends "
            "images; choose a run of another method, such as fed_dpsd"
        )
    images = Pictures(sent)
    if number > len(images):
        raise UserError(
            f"{number:,} images are too many: the run sent {len(images):,}, and its method cannot "
            "draw others; ask for no more than these"
        )
    return images[streams.numpy(PURPOSE).permutation(len(images))[:number]]


# --- the file ------------------------------------------------------------------------------------


def table_of(
    images: NDArray[np.uint8], scores: NDArray[np.float32] | None, classes: tuple[str, ...]
) -> pyarrow.Table:
    """Return a table with a schema that describes its columns in the hub's format.

    Args:
        images: (N, C, S, S).
        scores: (N, K) probabilities, or None for images without labels.
        classes: the names of the K classes.
    """
    columns: dict[str, Any] = {
        "image": [{"bytes": encode_png(image), "path": None} for image in images]
    }
    types = {"image": pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})}
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    if scores is not None:
        columns |= {"label": scores.argmax(1), "probabilities": scores.tolist()}
        types |= {
            "label": pyarrow.int64(),
            "probabilities": pyarrow.list_(pyarrow.float32(), len(classes)),
        }
        features["label"] = {"names": list(classes), "_type": "ClassLabel"}
        features["probabilities"] = {
            "feature": {"dtype": "float32", "_type": "Value"},
            "length": len(classes),
            "_type": "Sequence",
        }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pyarrow.table(columns, pyarrow.schema(types.items(), metadata))


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """Return (C, S, S) pixels as a PNG file."""
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(content, "PNG")
    return content.getvalue()
