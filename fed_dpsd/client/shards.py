"""Plain training of many linear teachers at once, each as if the others did not exist.

A step of one small linear classifier takes longer to start than to compute. Here, each operation
computes the step of SLOTS classifiers. A slot's result must not depend on the other slots to the
last bit: a changed record may change only its own teacher.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fed_dpsd.config import TeacherConfig
from fed_dpsd.privacy.lattice import places_agree
from fed_dpsd.progress import track

SLOTS = 32  # classifiers in each operation, whatever the number of shards
LEAST = 16  # teachers of a client that are trained this way; fewer are faster one by one
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see `Slots.losses`
MakeOptimiser = Callable[[nn.Module, TeacherConfig], torch.optim.Optimizer]
_agree: dict[tuple[object, ...], bool] = {}


@dataclass(frozen=True)
class Shard:
    """A linear classifier and what it learns from.

    Attributes:
        layer: the classifier with its initial weights.
        inputs: (N, F) features, N >= 1.
        labels: (N,) labels.
        steps: the number of steps, >= 1.
        batches: the indices of each step's records, 1 to `batch_size`.
    """

    layer: nn.Linear
    inputs: torch.Tensor
    labels: torch.Tensor
    steps: int
    batches: Iterator[torch.Tensor]


class Slots(nn.Module):
    """SLOTS linear classifiers with stacked parameters: (SLOTS, K, F) and (SLOTS, 1, K)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        unused = SLOTS - len(layers)
        weight = torch.stack([layer.weight.detach() for layer in layers])
        bias = torch.stack([layer.bias.detach() for layer in layers])[:, None]
        self.weight = nn.Parameter(torch.cat([weight, weight.new_zeros(unused, *weight.shape[1:])]))
        self.bias = nn.Parameter(torch.cat([bias, bias.new_zeros(unused, *bias.shape[1:])]))

    def losses(
        self, inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return each slot's sum of weighted cross-entropies.

        Args:
            inputs: (SLOTS, B, F).
            labels: (SLOTS, B).
            weights: (SLOTS, B).
        """
        logits = torch.baddbmm(self.bias, inputs, self.weight.mT)
        each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each.view_as(weights) * weights).sum(1)


def train_together(
    shards: Sequence[Shard], settings: TeacherConfig, optimiser: MakeOptimiser
) -> list[list[torch.Tensor]]:
    """Train the layers of at most SLOTS shards; return the losses of each one's steps.

    Each layer ends with the same bits whatever the other shards hold (see `slots_agree`).
    """
    slots = Slots([shard.layer for shard in shards])
    losses: list[list[torch.Tensor]] = [[] for _ in shards]
    batches = _batches(shards, settings.batch_size)
    for step, every in enumerate(_descend(slots, batches, optimiser(slots, settings))):
        for slot, shard in enumerate(shards):
            if step < shard.steps:
                losses[slot].append(every[slot])
            if step + 1 == shard.steps:  # later steps of this slot are not used
                shard.layer.load_state_dict(
                    {"weight": slots.weight[slot], "bias": slots.bias[slot, 0]}
                )
    return losses


def slots_agree(
    num_features: int, num_classes: int, settings: TeacherConfig, optimiser: MakeOptimiser
) -> bool:
    """Return whether a slot's classifier has the same bits in every slot and among any others.

    It is determined with random records, once per process and shape.
    """
    size = settings.batch_size
    layer = nn.Linear(num_features, num_classes)
    nn.init.constant_(layer.weight, 0.01)

    def trained(records: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        slots = Slots([layer] * SLOTS)
        classes = (labels[:, None] + torch.arange(size)) % num_classes
        batch = records, classes, torch.full(classes.shape, 1 / size)
        for _ in _descend(slots, [batch] * 2, optimiser(slots, settings)):
            pass
        return [slots.weight.detach(), slots.bias.detach()]

    key = num_features, num_classes, size, settings.momentum, torch.get_num_threads()
    if key not in _agree:
        _agree[key] = places_agree(trained, torch.empty(0, size, num_features), SLOTS)
    return _agree[key]


def _descend(
    slots: Slots, batches: Iterable[Batch], optimiser: torch.optim.Optimizer
) -> Iterator[torch.Tensor]:
    """Take a step for each batch, and yield the (SLOTS,) losses before it."""
    for batch in batches:
        losses = slots.losses(*batch)
        optimiser.zero_grad()
        losses.sum().backward()
        optimiser.step()
        yield losses.detach()


def _batches(shards: Sequence[Shard], size: int) -> Iterator[Batch]:
    """Yield the batches of all steps; rows that a slot does not need have zero weight."""
    inputs = torch.cat([shard.inputs for shard in shards])
    labels = torch.cat([shard.labels for shard in shards])
    lengths = [len(shard.labels) for shard in shards]
    for step in track("steps of a teacher", range(max(each.steps for each in shards))):
        places, weights = torch.zeros(SLOTS, size, dtype=torch.int64), torch.zeros(SLOTS, size)
        for slot, shard in enumerate(shards):
            if step < shard.steps:
                chosen = next(shard.batches)
                places[slot, : len(chosen)] = chosen + sum(lengths[:slot])
                weights[slot, : len(chosen)] = 1 / len(chosen)
        yield inputs[places], labels[places], weights
