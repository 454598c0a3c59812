"""What teachers learn from: the inputs of a shard, training without noise in its steps, divergence.

`ShardLearner.fit` is plain training, except for many linear teachers of a simulation (shards.py).
Private training reads `ShardLearner.features` instead.
"""

import contextlib
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fed_dpsd.config import Config, TeacherConfig
from fed_dpsd.context import setting
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import Diverged
from fed_dpsd.methods.method import TrainingLoss
from fed_dpsd.models.augmentation import augment
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import check_losses, is_finite
from fed_dpsd.models.fixed_features import feature_cache
from fed_dpsd.models.inference import IMAGES_AT_ONCE, to_unit, to_unit_all, trainable_part
from fed_dpsd.models.pictures import Chosen, Pictures
from fed_dpsd.models.pretrained import Pretrained
from fed_dpsd.privacy.lattice import places_agree
from fed_dpsd.privacy.optimisers import SGD, Adam
from fed_dpsd.privacy.training import Plain, Targets, Training, fixed_targets, patient_places
from fed_dpsd.progress import reporting, track

Role = Literal["teacher", "baseline"]
logger = logging.getLogger("fed_dpsd")
CPU = torch.device("cpu")
PROBED = 16  # images whose gradients identify a network's kernels
# Shifts of the copies of an image, in pixels down and to the right.
MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_safe_batches: dict[tuple[object, ...], int] = {}
_others: ContextVar[Iterator[NDArray[np.uint8]] | None] = ContextVar("others", default=None)


def train(
    teacher: Classifier,
    records: Records,
    config: Config,
    rng: torch.Generator,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Train a teacher on one shard's N >= 1 records, with Adam or, if a momentum is given, SGD.

    Afterwards, the teacher is on `device`. Batches are taken from a new permutation in each epoch.
    If a shard has fewer records than a batch, each step uses all of them. A batch of one record
    holds it twice.

    Returns:
        The loss of each step, on `device`; these values are private.
    """
    network = ShardLearner(teacher, records, config, lambda _: rng, device)
    network.fit(np.arange(len(records)), fixed_targets(records.labels))
    return network.losses


@contextlib.contextmanager
def reporting_steps(training: Training) -> Iterator[None]:
    """Report each optimiser step in the block, if training has a number of `steps` of its own."""
    steps = getattr(training, "steps", None)
    if steps is None:
        yield
        return
    with (
        reporting("steps of a teacher", steps) as task,
        register_optimizer_step_post_hook(lambda *_: task.advance()),
    ):
        yield


@contextlib.contextmanager
def added_loss(teacher: nn.Module, loss: TrainingLoss | None) -> Iterator[None]:
    """Add a loss of a teacher's parameters to all training in the block.

    The parameters start from their current values. The loss's gradient, which depends on no record,
    is added to each optimiser step's gradient, after any noise of private training.
    """
    if loss is None:
        yield
        return
    starts = {parameter: parameter.detach().clone() for parameter in teacher.parameters()}

    def add(optimiser: torch.optim.Optimizer, *_: object) -> None:
        every = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        learning = [each for each in every if each.grad is not None and each in starts]
        if not learning:
            return
        weights = [each.detach().requires_grad_() for each in learning]  # without hooks of Opacus
        value = loss(weights, [starts[each].to(each.device) for each in learning])
        for parameter, gradient in zip(learning, torch.autograd.grad(value, weights), strict=True):
            parameter.grad.add_(gradient)

    with register_optimizer_step_pre_hook(add):
        yield


class ShardLearner:
    """A teacher that learns from its shard; it implements `privacy.training.Learner`.

    Args:
        teacher: the teacher, on the CPU; each `fit` starts from its initial weights.
        records: the records of its shard.
        config: the site's configuration; `config.teacher` sets how the teacher learns.
        draw: returns the random generator for a purpose, such as the batches of a `fit`.
        device: the device to learn on; only one batch of images at a time leaves the CPU.
    """

    def __init__(
        self,
        teacher: Classifier,
        records: Records,
        config: Config,
        draw: Callable[[str], torch.Generator],
        device: torch.device = CPU,
    ) -> None:
        self._teacher, self._settings, self._draw = teacher, config.teacher, draw
        self._records, self._device = records, device
        self._fits = 0
        self.losses: list[torch.Tensor] = []

    @functools.cached_property
    def _start(self) -> tuple[nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the trainable part, its inputs, on the CPU, and the teacher's initial weights."""
        model, inputs, _ = read_shard(self._teacher, self._records, Plain())
        initial = self._teacher.to(self._device).state_dict()
        return model, inputs, {name: tensor.clone() for name, tensor in initial.items()}

    def fit(self, records: NDArray[np.int64], targets: Targets) -> None:
        """Train on n >= 1 records, starting from the initial weights.

        `losses` then holds the loss of each step, a private value.
        """
        model, inputs, initial = self._start
        if self._fits:
            self._teacher.load_state_dict(initial)
        self.losses = []
        self._fits += 1
        settings = self._settings
        rng = self._draw(f"batches of fit {self._fits}")
        optimiser = make_optimiser(model, settings)
        self._teacher.train()
        steps = range(number_of_steps(len(records), settings))
        schedule = _one_cycle(optimiser, settings, len(steps)) if settings.one_cycle else None
        batches = batches_of(torch.from_numpy(records), settings.batch_size, rng)
        for _, chosen in zip(track("steps of a teacher", steps), batches, strict=False):
            if len(chosen) == 1:  # BatchNorm may reject a single image, revealing a lone record
                chosen = chosen.repeat(2)
            seen = augment(inputs[chosen], settings.shift, settings.flip, rng)
            logits = model(seen.to(self._device))
            wanted = targets(chosen, logits.detach()).to(self._device)
            loss = nn.functional.cross_entropy(logits, wanted)
            self.losses.append(loss.detach())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if schedule:
                schedule.step()

    @torch.inference_mode()
    def probabilities(self, records: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the teacher's (n, K) probabilities on these records' images."""
        model, inputs, _ = self._start
        self._teacher.eval()
        parts = [
            model(inputs[chosen].to(self._device)).softmax(1)
            for chosen in torch.from_numpy(records).split(IMAGES_AT_ONCE)
        ]
        return torch.cat(parts).double().cpu().numpy()

    def features(self, training: Training) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        """Return the trainable part, and the inputs and labels that training reads."""
        return read_shard(self._teacher, self._records, training)


def number_of_steps(count: int, settings: TeacherConfig) -> int:
    """Return the number of steps of plain training on `count` >= 1 records."""
    return max(settings.epochs * (count // min(settings.batch_size, count)), settings.min_steps)


def batches_of(records: torch.Tensor, size: int, rng: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield batches of at most `size` records without end, from a permutation in each epoch."""
    size = min(size, len(records))
    while True:
        order = records[torch.randperm(len(records), generator=rng)]
        yield from order[: len(records) // size * size].split(size)


def read_shard(
    teacher: Classifier, records: Records, training: Training
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the trainable part of a teacher, and the inputs and labels that it reads.

    Args:
        teacher: an untrained teacher, on the CPU.
        records: the records of its shard.
        training: how it is trained. Private training may read shifted copies of images and group
            the records by patient.
    """
    images, labels = records.images, torch.from_numpy(records.labels)
    others = _others.get() if teacher.ours else None
    if not training.private:
        if others is not None and safe_batch(teacher, images) != IMAGES_AT_ONCE:
            others = None  # an image's features may depend on other images in its batch
        with feature_cache("records"):
            model, take = trainable_part(teacher, images, CPU, others=others)
        return model, take(slice(None)) if teacher.fixed else to_unit_all(images), labels
    copies = ShiftedCopies(images, training.copies)
    with feature_cache("records"):
        batch = safe_batch(teacher, images)  # a batch of one image is never filled by others
        model, take = trainable_part(teacher, copies, CPU, batch, others=others)
    places = np.arange(len(copies)).reshape(len(images), training.copies)
    if training.unit == "patient":
        of_patients = places_of_patients(records, training)
        patients, most = of_patients.shape  # a shard may have none
        places = places[of_patients].reshape(patients, most * training.copies)
        labels = labels[torch.from_numpy(of_patients)].repeat_interleave(training.copies, dim=1)
    flat = places.ravel()
    inputs = take(torch.from_numpy(flat)) if teacher.fixed else to_unit_all(Chosen(copies, flat))
    return model, inputs.unflatten(0, places.shape), labels


def sharing_batches(images: Iterable[NDArray[np.uint8]]) -> AbstractContextManager[None]:
    """Let `read_shard` fill incomplete batches in this block with images that it reads later.

    All must be read by one kind of our networks on fixed features.
    """
    return setting(_others, iter(images))


def last_images(records: Records, training: Training) -> NDArray[np.uint8]:
    """Return the images in the last, incomplete batch that `read_shard` reads of a shard."""
    images: NDArray[np.uint8] | Pictures = records.images
    if training.private:
        images = ShiftedCopies(records.images, training.copies)
    return images[len(images) // IMAGES_AT_ONCE * IMAGES_AT_ONCE :]


def safe_batch(teacher: Classifier, images: NDArray[np.uint8]) -> int:
    """Return a batch size at which an image's features depend only on that image, to the last bit.

    It is determined with random images, once per process and kind of features. Public features are
    computed in batches of their own (see `pretrained.Memory`), so pixels stand for them.
    """
    backbone = teacher.backbone

    def features(pixels: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
        batch = to_unit((255 * pixels).byte().numpy(), CPU)
        with feature_cache("nothing"):
            if not isinstance(backbone, Pretrained):
                return [teacher.features(batch)]
            size = backbone.public.num_features
            public = batch.flatten(1).repeat(1, -(-size // batch[0].numel()))[:, :size]
            return [backbone.joined(public, 2 * batch - 1)]

    if not teacher.fixed:
        return IMAGES_AT_ONCE
    key = (*teacher.features_key, images.shape[1:])
    if key not in _safe_batches:
        agree = places_agree(features, torch.empty(0, *images.shape[1:]), IMAGES_AT_ONCE)
        _safe_batches[key] = IMAGES_AT_ONCE if agree else 1
    return _safe_batches[key]


class ShiftedCopies(Pictures):
    """(N * A, C, H, W) images: A copies of each of N images in turn, made when they are read."""

    def __init__(self, images: NDArray[np.uint8], copies: int) -> None:
        self._images, self._copies = images, copies
        self.shape = (len(images) * copies, *images.shape[1:])

    def __getitem__(self, chosen: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images in a slice or at non-negative (n,) indices."""
        records, copies = np.divmod(np.arange(len(self))[chosen], self._copies)
        own, places = np.unique(records, return_inverse=True)
        return shifted(self._images[own], self._copies)[places, copies]


def shifted(images: NDArray[np.uint8], copies: int) -> NDArray[np.uint8]:
    """Return (N, A, C, H, W) copies of (N, C, H, W) images: unshifted, then shifted by one pixel.

    Border pixels are repeated.
    """
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    moved = [
        padded[:, :, 1 + down :, 1 + right :][:, :, :height, :width]
        for down, right in MOVES[:copies]
    ]
    return np.stack(moved, axis=1)


def places_of_patients(records: Records, training: Training) -> NDArray[np.int64]:
    """Return the (P, R) indices of the records that represent each patient of a shard."""
    assert records.patients is not None
    return patient_places(records.patients, training.records_per_patient)


def digest_of_shard(key: str, teacher: Classifier, records: Records, training: Training) -> str:
    """Return a digest of a key, the initial weights, the inputs and the labels, in that order.

    With fixed features, the features are the inputs. Otherwise, the network computes more, so its
    gradients on the first records are part of the digest: different kernels round them differently.
    """
    model, inputs, labels = read_shard(teacher, records, training)
    digest = hashlib.sha256(f"{key} {tuple(inputs.shape)}".encode())
    at_once = max(1, IMAGES_AT_ONCE // math.prod(inputs.shape[1:-3]))
    parts = inputs.split(at_once)  # a copy of all need not fit in memory
    for tensor in (*model.state_dict().values(), *parts, labels):
        digest.update(np.ascontiguousarray(tensor.detach().numpy()).data)
    if not teacher.fixed and len(inputs):
        first = inputs[:PROBED].flatten(0, inputs.ndim - 4)[:PROBED]
        model.eval()(first).square().sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                digest.update(np.ascontiguousarray(parameter.grad.numpy()).data)
    return digest.hexdigest()


def make_optimiser(model: nn.Module, settings: TeacherConfig) -> torch.optim.Optimizer:
    """Return the optimiser of plain training: Adam or, if a momentum is given, SGD."""
    rate, decay = settings.learning_rate, settings.weight_decay
    # Fused steps of large networks are faster, but round differently than float32 promises.
    fused = isinstance(model, Classifier) and model.in_bfloat16
    how: dict[str, Any] = {"fused" if fused else "foreach": True}
    if settings.momentum is None:
        return Adam(model.parameters(), rate, weight_decay=decay, **how)
    return SGD(model.parameters(), rate, settings.momentum, weight_decay=decay, **how)


def _one_cycle(
    optimiser: torch.optim.Optimizer, settings: TeacherConfig, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimiser,
        settings.learning_rate,
        total_steps=max(steps, 10),  # it divides by the steps of either part
        pct_start=0.2,
        cycle_momentum=False,
    )


class Watch:
    """A check for divergence in the training of a client's teachers or its "baseline".

    At a hospital, divergence is reported only in its own log and in `diverged`: an error would
    reveal a fact about records that no noise covers (docs/mechanisms.md, "Sharp edges").
    """

    def __init__(self, config: Config, training: Training, client: int, role: Role) -> None:
        self._config, self._client, self._role = config, client, role
        self.diverged: list[Diverged] = []
        group: str = "teacher"
        rate: float | None = config.teacher.learning_rate
        if training.reads == "features":
            group = "training" if role == "teacher" else "method.baseline"
            rate = getattr(training, "learning_rate", None)  # a plug-in's training may have none
        self._rates = {} if rate is None else {f"{group}.learning_rate": rate}

    def check_losses(self, losses: Sequence[torch.Tensor], shard: int) -> None:
        """Check the losses of plain training, in simulations only: they are exact and private.

        Raises:
            Diverged: in a simulation, a loss is NaN or infinite.
        """
        if self._config.federation.simulation:
            check_losses(losses, self._named(shard), self._rates)

    def check(self, teacher: Classifier, shard: int) -> None:
        """Check a trained teacher, using its weights alone.

        Raises:
            Diverged: in a simulation, weights or predictions are not finite.
        """
        if is_finite(teacher, self._config.data.shape):
            return
        named = self._named(shard)
        error = Diverged(f"weights or predictions of {named} are NaN or infinite", self._rates)
        if self._config.federation.simulation:
            raise error
        self.diverged.append(error)
        logger.error("%s; until then it answers like a teacher without records", error)

    def _named(self, shard: int) -> str:
        number = f" {shard}" if self._config.teachers_per_client > 1 else ""
        return f"client {self._client}'s {self._role}{number}"
