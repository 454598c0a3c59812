"""Plain training of many linear teachers at once, each as if the others did not exist.

A step of one small linear classifier takes longer to start than to compute. In simulations, each
operation computes the step of SLOTS classifiers. A slot's result must not depend on the other slots
to the last bit: a changed record may change only its own teacher.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fed_dpsd.client.learning import batches_of, make_optimiser, number_of_steps
from fed_dpsd.config import TeacherConfig
from fed_dpsd.privacy.lattice import places_agree
from fed_dpsd.progress import track

SLOTS = 32  # classifiers in each operation, whatever the number of shards
LEAST = 16  # teachers of a client that are trained this way; fewer are faster one by one
LARGEST = 2**16  # numbers in a batch; teachers with larger ones are faster one by one
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see `Slots.losses`
_agree: dict[tuple[object, ...], bool] = {}


@dataclass(frozen=True)
class Shard:
    """A linear classifier and what it learns from.

    Attributes:
        layer: the classifier with its initial weights.
        inputs: (N, F) features, N >= 1.
        labels: (N,) labels.
        rng: draws its batches.
    """

    layer: nn.Linear
    inputs: torch.Tensor
    labels: torch.Tensor
    rng: torch.Generator


class Slots(nn.Module):
    """SLOTS linear classifiers with stacked parameters: (SLOTS, K, F) and (SLOTS, 1, K)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        layers = [*layers, *[layers[0]] * (SLOTS - len(layers))]  # fills all slots
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers])[:, None])

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


def train_together(shards: Sequence[Shard], settings: TeacherConfig) -> list[list[torch.Tensor]]:
    """Train the layers of at most SLOTS shards; return the losses of each one's steps.

    Each layer ends with the same bits whatever the other shards hold (see `slots_agree`).
    """
    slots = Slots([shard.layer for shard in shards])
    steps = [number_of_steps(len(shard.labels), settings) for shard in shards]
    losses: list[list[torch.Tensor]] = [[] for _ in shards]
    every_batch = _batches(shards, steps, settings.batch_size)
    for step, every in enumerate(_descend(slots, every_batch, settings)):
        for slot, shard in enumerate(shards):
            if step < steps[slot]:
                losses[slot].append(every[slot])
            if step + 1 == steps[slot]:  # later steps of this slot are not used
                shard.layer.load_state_dict(
                    {"weight": slots.weight[slot], "bias": slots.bias[slot, 0]}
                )
    return losses


def slots_agree(layer: nn.Linear, settings: TeacherConfig) -> bool:
    """Return whether a slot's steps have the same bits in every slot and among any others.

    It is determined once per process, threads, settings and shape: by two steps from the weights
    of `layer`, on random records.
    """

    def trained(records: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        slots, results = Slots([layer] * SLOTS), []
        classes = (labels[:, None] + torch.arange(records.shape[1])) % layer.out_features
        batch = records, classes, torch.full(classes.shape, 1 / records.shape[1])
        for losses in _descend(slots, [batch] * 2, settings):
            # Steps of Adam hide small differences of gradients.
            gradients = [each.grad.clone() for each in slots.parameters() if each.grad is not None]
            results += [losses, *gradients, *(each.detach().clone() for each in slots.parameters())]
        return results

    key = *layer.weight.shape, repr(settings), torch.get_num_threads()
    if key not in _agree:
        inputs = torch.empty(0, settings.batch_size, layer.in_features)
        _agree[key] = places_agree(trained, inputs, SLOTS)
    return _agree[key]


def _descend(
    slots: Slots, batches: Iterable[Batch], settings: TeacherConfig
) -> Iterator[torch.Tensor]:
    """Take a step for each batch, and yield the (SLOTS,) losses before it."""
    optimiser = make_optimiser(slots, settings)
    for batch in batches:
        losses = slots.losses(*batch)
        optimiser.zero_grad()
        losses.sum().backward()
        optimiser.step()
        yield losses.detach()


def _batches(shards: Sequence[Shard], steps: Sequence[int], size: int) -> Iterator[Batch]:
    """Yield the batches of all steps; rows that a slot does not need are zeros of zero weight."""
    own = [batches_of(torch.arange(len(each.labels)), size, each.rng) for each in shards]
    for step in track("steps of a teacher", range(max(steps))):
        inputs = torch.zeros(SLOTS, size, shards[0].inputs.shape[1])
        labels, weights = torch.zeros(SLOTS, size, dtype=torch.int64), torch.zeros(SLOTS, size)
        for slot, shard in enumerate(shards):
            if step < steps[slot]:
                chosen = next(own[slot])
                inputs[slot, : len(chosen)] = shard.inputs[chosen]
                labels[slot, : len(chosen)] = shard.labels[chosen]
                weights[slot, : len(chosen)] = 1 / len(chosen)
        yield inputs, labels, weights
