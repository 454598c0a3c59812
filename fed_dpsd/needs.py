"""Estimates of the memory, the disk and the messages of a run, from its configuration alone.

They count what grows: with the queries, the records, the side of an image and the networks. The
rest of a process is a constant. Nothing here reads an image or depends on records, except on their
number.
"""

import contextlib
import functools
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from fed_dpsd.config import Config, ModelConfig
from fed_dpsd.errors import UserError, size_text
from fed_dpsd.experiment import Experiment, count_items
from fed_dpsd.methods.queries import Queries
from fed_dpsd.models.classifiers import FIXED, OURS, Classifier, builder
from fed_dpsd.models.devices import PROCESSOR_BYTES
from fed_dpsd.models.fixed_features import FixedFeatures
from fed_dpsd.models.footprint import peak_bytes, weight_bytes
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.pretrained import Pretrained
from fed_dpsd.models.procedural import SIDE
from fed_dpsd.models.scattering import EXAMPLES, Scattering
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import Weights, quorum_of
from fed_dpsd.privacy.record_sums import RecordSums
from fed_dpsd.privacy.training import BaselineWeights
from fed_dpsd.storage import LARGE, nearest_existing

PROCESS = 650 * 10**6  # bytes of Python, torch and the other libraries
# Bytes for each pixel of an image of at most SIDE in a step. Larger ones are measured, which takes
# torch seconds to prepare.
SMALL_WORK = 2_000
# where Linux states the control groups of this process, and their limits
CONTROL_GROUPS, CONTROLS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
KEPT = 3  # requests that a server and the states that a checkpoint keep on disk, at most
PICTURES = 64  # images of a round in a run folder's pictures
PAGES = 10**6  # bytes of the log, test predictions and pictures of pages
IN_WORK = 6  # copies of a round's images while they are drawn, packed and answered
NUMBER = 8  # bytes of a number in an answer, at most
FLOAT = 4
WEIGHTS = (Weights, BaselineWeights)  # what a server keeps of all clients at once
# Where each part of the memory comes from, and the keys that make it smaller.
REMEDIES = {
    "queries": "fewer rounds or a smaller queries_per_round",
    "teachers": "fewer teachers_per_client, or a smaller network (model.teacher)",
    "records": "a smaller data.shape, or fewer records",
    "images": "a smaller data.shape, or another network (model=)",
}


@dataclass(frozen=True)
class Needs:
    """What a run needs, in bytes.

    Args:
        server: the server's memory, by the keys of REMEDIES, and its process.
        client: a client's memory in addition to a process, by the keys of REMEDIES.
        clients: the number of clients that this machine simulates; 0 if they are hospitals.
        run_disk: the bytes of the run folder, with the answers in simulated clients' ledgers.
        cache_disk: the bytes of the cache.
        client_disk: the bytes of a hospital's ledger and teachers.
        temporary: the bytes of temporary files, of all simulated clients or of a hospital.
        request: the bytes of the largest request and of its answer.
        per_client: the bytes of all requests to a client and of their answers.
        records: the number of training records that are counted; None if it is unknown.
    """

    server: Mapping[str, int]
    client: Mapping[str, int]
    clients: int
    run_disk: int
    cache_disk: int
    client_disk: int
    temporary: int
    request: int
    per_client: int
    records: int | None

    @property
    def server_memory(self) -> int:
        """Return the server's memory, with its process."""
        return sum(self.server.values())

    @property
    def client_memory(self) -> int:
        """Return a hospital's memory, with its process."""
        return PROCESS + sum(self.client.values())

    @property
    def here(self) -> Mapping[str, int]:
        """Return the memory of this machine: the server's and the simulated clients'.

        Simulated clients share what they compute of the requests' images, and a limited memory for
        teachers.
        """
        if not self.clients:
            return self.server
        own = dict(self.client)
        own["records"] *= self.clients
        own["teachers"] = min(self.clients * own["teachers"], max(PROCESSOR_BYTES, own["teachers"]))
        return {part: count + own.get(part, 0) for part, count in self.server.items()}

    def __str__(self) -> str:
        """Return the estimates in two lines."""
        each = f"{size_text(self.server_memory)} at the server"
        each += f", {size_text(self.client_memory)} at a client"
        if self.clients:
            each = f"{size_text(sum(self.here.values()))} for the server and all clients"
        disk = f"{size_text(self.run_disk)} in the run folder"
        if self.clients:
            more = self.cache_disk + self.temporary
            disk += f", {size_text(more)} in the cache and temporary files"
        else:
            disk += f", {size_text(self.client_disk + self.temporary)} at a client"
        left_out = "" if self.records else ", besides the records"
        return (
            f"estimated need{left_out}: memory about {each}; disk about {disk}\n"
            f"estimated traffic: about {size_text(self.request)} for a request and its answer, "
            f"{size_text(self.per_client)} for a client in the whole run"
        )


def needs_of(experiment: Experiment, records: int | None = None, cached: bool = False) -> Needs:
    """Estimate what a run needs, without reading anything.

    Args:
        experiment: the run.
        records: the number of training records of a simulation, or of a hospital, if known.
        cached: whether the records are decoded in the cache, from which they are mapped.
    """
    config, simulated = experiment.config, experiment.config.federation.simulation
    model, shape, classes = config.model, config.data.shape, config.data.num_classes
    pixels, row = math.prod(shape), classes * NUMBER
    stages = [stage for stage in experiment.plan.stages if _asks_images(experiment, stage)]
    asked = sum(stage.requests * stage.queries for stage in stages)
    # A client of a cohort answers some of the rounds, and the server keeps all of them.
    kept = config.rounds * config.queries_per_round if stages else 0
    each = max((stage.queries for stage in stages), default=0)

    student = _network(model, model.student, shape, classes, model.student_width)
    names = {config.architecture(client) for client in range(min(config.num_clients, 100))}
    teachers = [_network(model, name, shape, classes, model.teacher_width) for name in names]
    weights = config.teachers_per_client * max(map(weight_bytes, teachers))
    teacher = max(teachers, key=_features)
    batch = getattr(experiment.method, "batch_size", config.teacher.batch_size)
    teaching = max(
        _work(model, name, shape, classes, model.teacher_width, config.teacher.batch_size)
        for name in names
    )
    learning = _work(model, model.student, shape, classes, model.student_width, batch)
    learning = max(learning, _generating(experiment))
    # Predictions and labels, by rounds and joined; a student's fixed features in float64, also by
    # batches and joined, and in float32, and a teacher's. Images are mapped from the checkpoint.
    sample = 4 * FLOAT * classes + (2 * 8 + FLOAT) * _features(student)
    sample += FLOAT * _features(teacher) if simulated else 0
    exchanged = [
        _exchanged(experiment, stage, weights, teacher) for stage in experiment.plan.stages
    ]
    clients = config.num_clients if simulated else 0
    sends_weights = any(isinstance(s.mechanism, WEIGHTS) for s in experiment.plan.stages)
    own = math.ceil((records or 0) / max(clients, 1))
    answers, components = asked * row, sum(map(_components, {student, teacher}))
    # Copies of records that were read, and what a network learns from; large ones are in files.
    floats = 0 if teacher.fixed else 4 * getattr(experiment.training, "copies", 1)
    read = 0 if cached else pixels  # bytes of a record that is decoded first
    held = sum(min(own * pixels * number, 2 * LARGE) for number in (3, floats))
    in_files = own * pixels * (3 + floats) - held
    return Needs(
        server={
            "process": PROCESS,
            "queries": kept * sample + each * pixels * IN_WORK,
            "images": learning + 3 * weight_bytes(student),
            "teachers": config.num_clients * weights if sends_weights else 0,
            "records": 0,
        },
        client={
            "queries": each * (pixels + FLOAT * _features(teacher)),
            "images": max(0, teaching - learning) if clients else teaching,
            "teachers": weights,
            "records": own * (read + 10 * FLOAT * _features(teacher)) + held,
        },
        clients=clients,
        run_disk=kept * (pixels + 2 * classes * FLOAT)
        + (config.rounds * min(each, PICTURES) * pixels)
        + KEPT * (each * (pixels + classes * FLOAT) + weight_bytes(student) + _kept(experiment))
        + PAGES
        + clients * answers * bool(config.ledger or quorum_of(experiment.answers)),
        cache_disk=(records or 0) * read + clients * weights + components,
        client_disk=answers + weights + components,
        temporary=max(clients, 1) * in_files,
        request=max((one for one, _ in exchanged), default=0),
        per_client=sum(every for _, every in exchanged),
        records=records,
    )


def require_room(experiment: Experiment, new: bool = True, count: bool = False) -> None:
    """Check that a run fits into this machine's memory and disk.

    Args:
        experiment: the run.
        new: whether the run starts; a resumed run has written a part of its files.
        count: whether to count a simulation's files or rows; otherwise, records are left out.

    Raises:
        UserError: it does not fit; the message names the keys to change. No image was read.
    """
    config, records, cached = experiment.config, None, False
    if count and config.federation.simulation:
        records, cached = count_items(config.data, config.cache)
    needs, typed = needs_of(experiment, records, cached), _typed(config)
    _require_memory(needs.here, typed)
    if not new:
        return
    _require_disk(Path(config.run_folder or config.out), needs.run_disk, typed, "queries")
    _require_disk(Path(config.cache), needs.cache_disk, typed, "records")


def require_room_of_hospital(experiment: Experiment, records: int) -> None:
    """Check that a hospital's part of a run fits into its machine, with this many records.

    Raises:
        UserError: it does not fit; the message names the keys to change. No image was read.
    """
    needs, config = needs_of(experiment, records), experiment.config
    _require_memory({"process": PROCESS, **needs.client}, _typed(config))
    _require_disk(Path(config.out), needs.client_disk, _typed(config), "queries")


def _typed(config: Config) -> str:
    shape = str(list(config.data.shape)).replace(" ", "")
    return f"rounds={config.rounds} queries_per_round={config.queries_per_round} data.shape={shape}"


def _require_memory(parts: Mapping[str, int], typed: str) -> None:
    needed, total = sum(parts.values()), min([psutil.virtual_memory().total, *_limits()])
    if needed > total:
        most = max(REMEDIES, key=lambda part: parts.get(part, 0))
        raise UserError(
            f"{typed}: the run needs about {size_text(needed)} of memory, and this machine has "
            f"{size_text(total)}; use {REMEDIES[most]}"
        )


def _limits() -> Iterator[int]:
    """Yield the memory limits of this process's control groups, such as a service's."""
    with contextlib.suppress(OSError):
        for line in CONTROL_GROUPS.read_text().splitlines():
            own = Path(line.split(":", 2)[2])
            for place in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    yield int((CONTROLS / str(place).lstrip("/") / "memory.max").read_text())


def _require_disk(folder: Path, needed: int, typed: str, part: str) -> None:
    place = nearest_existing(folder)
    disk = shutil.disk_usage(place)
    free, writable = disk.free, os.access(place, os.W_OK)
    if needed > free and disk.total and writable:  # otherwise, a write says what is wrong
        raise UserError(
            f"{typed}: the run writes about {size_text(needed)} to {folder}, which has "
            f"{size_text(free)} free; use {REMEDIES[part]}, or another folder"
        )


def _asks_images(experiment: Experiment, stage: Stage) -> bool:
    return stage.mechanism == experiment.answers and experiment.answers.from_teachers


def _exchanged(
    experiment: Experiment, stage: Stage, weights: int, teacher: Classifier
) -> tuple[int, int]:
    """Return the bytes of a request of a stage with its answer, and of all requests."""
    config, answers, one = experiment.config, experiment.answers, 0
    if _asks_images(experiment, stage):
        classes = config.data.num_classes
        one = stage.queries * (math.prod(config.data.shape) + classes * (FLOAT + NUMBER))
    elif isinstance(answers, RecordSums) and stage.mechanism == answers:
        numbers = torch.zeros(answers.size_of_request(teacher.classifier)).numpy()
        request = experiment.public.request(answers.kind, 1, numbers)
        one = request.nbytes + NUMBER * math.prod(request.summed_shape)
    elif isinstance(stage.mechanism, WEIGHTS):
        one = 2 * weights  # after the first, a request may have weights too
    return one, stage.requests * one


# --- networks on the meta device ---


@functools.lru_cache(maxsize=32)
def _network(
    model: ModelConfig, name: str, shape: tuple[int, ...], classes: int, width: int
) -> Classifier:
    """Return a classifier without weights; a linear one if it cannot be built here."""
    try:
        with torch.device("meta"):
            return builder(name, model)(shape, classes, width)
    except UserError:  # a coordinator may lack the weights of public features
        return Classifier(nn.Flatten(), math.prod(shape), classes).to("meta")


def _features(classifier: Classifier) -> int:
    """Return the number of features that are kept for each image; 0 if a network computes them."""
    return classifier.classifier.in_features if classifier.fixed else 0


@functools.lru_cache(maxsize=32)
def _work(
    model: ModelConfig, name: str, shape: tuple[int, ...], classes: int, width: int, batch: int
) -> int:
    """Return the peak bytes of a network's work on a batch: a step, or its fixed features."""
    classifier, small = _network(model, name, shape, classes, width), _small(shape, batch)
    if isinstance(classifier.backbone, FixedFeatures):
        return small + _whitening(classifier.backbone)
    if isinstance(classifier.backbone, Pretrained):  # its file, its tensors and the network
        return small + 3 * classifier.backbone.public.num_bytes
    if classifier.fixed or name not in OURS or shape[1] <= SIDE:
        return small

    def step() -> None:
        images = torch.empty(batch, *shape, device="meta")
        classifier.train()(images).square().mean().backward()
        classifier.zero_grad()

    return small + peak_bytes(classifier, step)


def _small(shape: tuple[int, ...], batch: int) -> int:
    """Return about what a batch of small images takes, which is not worth measuring."""
    return SMALL_WORK * batch * min(shape[1], SIDE) ** 2


def _whitening(features: FixedFeatures) -> int:
    """Return the bytes to find principal components, which a cache then keeps."""
    numbers = features.num_coefficients(features.shape)
    return 4 * 8 * numbers * (EXAMPLES + numbers)


def _components(classifier: Classifier) -> int:
    """Return the bytes of the principal components that a cache keeps."""
    features = classifier.backbone
    if not isinstance(features, FixedFeatures):
        return 0
    return 8 * features.num_features * features.num_coefficients(features.shape)


def _kept(experiment: Experiment) -> int:
    """Return the bytes of a checkpoint's generator."""
    config, latent = experiment.config, getattr(experiment.method, "latent_size", None)
    if latent is None:
        return 0
    return weight_bytes(_generator(config.model, config.data.shape, latent))


def _generator(model: ModelConfig, shape: tuple[int, ...], latent: int) -> Generator:
    with torch.device("meta"):
        return Generator(shape, latent, model.generator_width)


def _generating(experiment: Experiment) -> int:
    """Return the peak bytes of a step of a generator against the student."""
    method, config = experiment.method, experiment.config
    if not isinstance(method, Queries) or not method.mixture(config.queries_per_round)["generated"]:
        return 0
    count, latent = method.images_per_generator, method.latent_size
    return _generator_step(config.model, config.data.shape, count, latent)


@functools.lru_cache(maxsize=32)
def _generator_step(model: ModelConfig, shape: tuple[int, ...], count: int, latent: int) -> int:
    if shape[1] <= SIDE:
        return _small(shape, count)
    scattering = model.student == "scattering"
    dtype = torch.float64 if model.student in FIXED else torch.float32
    generator = _generator(model, shape, latent).to(dtype)

    def step() -> None:
        images = generator(torch.empty(count, latent, dtype=dtype, device="meta"))
        coefficients = Scattering.coefficients(images) if scattering else images
        coefficients.square().mean().backward()

    return _small(shape, count) + peak_bytes(generator, step)
