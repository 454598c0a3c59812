"""Clipped per-record gradients as integers with exact sums.

A sum of floats depends on the order of additions. One more record may change the rounding of all
later additions, so it may move the sum by more than the bound on its own gradient
(Casacuberta, Shoemate, Vadhan, Wagaman: "Widespread Underestimation of Sensitivity in
Differentially Private Libraries and How to Fix It", arXiv 2207.10635). Here, every product and
every sum over a row or over records uses integers that their type represents exactly. Everything
else is computed element by element with correctly rounded IEEE operations. So a record's
contribution depends only on that record and the weights, and the sum of all contributions is exact,
independent of order, number of threads and batch size.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

if TYPE_CHECKING:
    from opacus import GradSampleModule

UNIT = 2.0**-24  # fraction of max_grad_norm; all sums are integer multiples of it
MOST_ROWS = 2**25  # copies of records in one sum: float64 holds every integer up to 2^53
MOST_INPUTS = 2**12  # of a linear layer; with more, its weights would be rounded too coarsely
ROOM = 1 - 2.0**-16  # part of the bound that norms may use; rounding may add the rest
MOST_MOMENTS = 2**21  # copies of records in one sum of second moments
OFF_DIAGONAL = 181 / 128  # just below sqrt(2): a triangle has at most the norm of its matrix
CANCELLATION = 4  # if copies cancel by more than this factor, their mean length over it is used

# A function from (B, A, ...) inputs and their labels to each record's gradients: (B, ...) for each
# parameter, followed by (B,) norms.
GradientFunction = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]

_LARGEST_EXACT = 2**24  # float32 represents every integer up to this one
_INPUT, _LARGEST_INPUT = 2.0**-4, 127  # the unit of an input, and its largest number of units
LARGEST_INPUT = _LARGEST_INPUT * _INPUT  # of a linear layer: a larger one is clamped to it
_RESIDUAL = 2.0**-20  # the unit of a residual
_ROWS_AT_ONCE = 128  # as many products of at most 2^10 times 127 add up to less than 2^24
_HALF = 2**10  # residuals are split into two numbers of at most this size
_BEYOND = 1e200  # an inner product so large that clipped residuals become zero
_LENGTH = 2**12  # the length of inputs, in units, whose moments are summed
_SUM = 2**20  # the same, of inputs that are summed for each class
_MOMENTS_AT_ONCE = 2**13
_STEPS = 2**10  # entries of the table of exponentials for each unit of a logit


@dataclass(frozen=True)
class Rows:
    """Records as integers for a linear layer; no record depends on another."""

    # (N, A, D) float32 integers of magnitude at most 127, in units of 1/16; larger inputs are
    # clamped to +-7.94
    inputs: torch.Tensor
    # (N, A, A) float64, the exact inner products of a record's copies, bias included. If an input
    # is not finite, the products are so large that the record counts as zero.
    inner: torch.Tensor
    labels: torch.Tensor  # (N,), or (N, A) if copies have their own labels

    @classmethod
    def of(cls, inputs: torch.Tensor, labels: torch.Tensor) -> "Rows":
        """Round (N, A, D) inputs of about unit size to integers, with their labels."""
        check_rows(inputs.shape[0] * inputs.shape[1])
        if inputs.shape[2] > MOST_INPUTS:
            raise ValueError(too_many_inputs(inputs.shape[2]))
        finite = torch.isfinite(inputs).all(2).all(1)
        whole = inputs.div(_INPUT).round_().clamp_(-_LARGEST_INPUT, _LARGEST_INPUT).nan_to_num_(0.0)
        exact = [part.double() for part in whole.split(_ROWS_AT_ONCE)]
        inner = torch.cat([part @ part.mT for part in exact]) + _INPUT**-2
        inner[~finite] = _BEYOND
        return cls(whole, inner, labels)

    def take(self, chosen: torch.Tensor) -> "Rows":
        """Return the records with the chosen numbers, in the given order."""
        if len(chosen) == len(self.labels):
            return self
        return Rows(*(part[chosen] for part in vars(self).values()))


@dataclass(frozen=True)
class LinearShard:
    """A linear layer and the records that it reads.

    Args:
        layer: the layer, whose weights may change.
        inputs: (N, A, D), the records' inputs, in A copies.
        labels: (N,), or (N, A) if copies have their own labels.
    """

    layer: nn.Linear
    inputs: torch.Tensor
    labels: torch.Tensor

    @functools.cached_property
    def records(self) -> Rows:
        """Return the records as integers."""
        return Rows.of(self.inputs, self.labels)


def too_many_inputs(count: int) -> str:
    """Return why a linear layer cannot have more than MOST_INPUTS inputs."""
    return (
        f"{count:,} inputs of a linear layer: products are exact for {MOST_INPUTS:,} at most; use "
        "fewer features (model.teacher_width)"
    )


def check_rows(rows: int) -> None:
    """Raise ValueError if a sum may exceed what float64 represents exactly."""
    if rows > MOST_ROWS:
        raise ValueError(
            f"{rows:,} copies of records at one teacher: sums are exact for {MOST_ROWS:,} at most; "
            "use fewer copies, or a larger teachers_per_client"
        )


def linear_sum(layer: nn.Linear, records: Rows, bound: float) -> tuple[torch.Tensor, ...]:
    """Sum clipped gradients of a linear layer under cross-entropy exactly, divided by `bound`.

    A record's part is the mean of its A copies' gradients, clipped to L2 norm `bound`. A gradient
    is the product of residuals and inputs, so the norm is known before computing the part.

    Guarantee: each record's part is a function of that record and the layer alone, with norm at
        most 1; the sum, (K, D) and (K,) float64 multiples of UNIT for weights and bias, is exact.
    """
    copies, features = records.inputs.shape[1:]
    rows = records.inputs.flatten(0, 1)
    residuals = _residuals(_logits(layer, rows), _labels(records.labels, copies))
    residuals *= _repeat(_scale(residuals, records.inner, bound).float(), copies)
    residuals.trunc_()
    high = residuals.div(_HALF).round_()
    halves = torch.cat([high, residuals.sub(high, alpha=_HALF)])
    groups, rest = divmod(len(rows), _ROWS_AT_ONCE)
    last = len(rows) - rest
    left = halves[:, :last].unflatten(1, (groups, _ROWS_AT_ONCE)).transpose(0, 1)
    products = left @ rows[:last].view(groups, _ROWS_AT_ONCE, features)
    total = products.sum(0, dtype=torch.float64) + (halves[:, last:] @ rows[last:]).double()
    first, second = total.chunk(2)
    weight = (first * _HALF + second) * (_RESIDUAL * _INPUT)
    return weight, residuals.sum(1, dtype=torch.float64) * _RESIDUAL


def moments_sum(records: Rows, num_classes: int, norms: tuple[float, float, float]) -> torch.Tensor:
    """Sum the second moments of the records' inputs and, of each class, the inputs and the number.

    A record's D inputs are scaled to length 1: u, (D,), or zero if all are below half a unit. Its
    part consists of the matrix u u^T, of u in the row of its class and of 1 in the count of its
    class, times `norms`. The part of a record with A copies is the mean of its copies' parts.

    Guarantee: each record's part is a function of that record alone, with norm at most 1; the sum
        is exact.

    Args:
        records: the records, N of them.
        num_classes: K.
        norms: the norms of the three components of a part; their squares sum to 1.

    Returns:
        (D (D + 1) / 2 + K (D + 1),) float64, for `of_moments`: the matrix's upper triangle, with
        the numbers off the diagonal times OFF_DIAGONAL, then the K rows, then the K counts.

    Raises:
        ValueError: there are too many records.
    """
    copies, size = records.inputs.shape[1:]
    rows, labels = records.inputs.flatten(0, 1), _labels(records.labels, copies)
    if len(rows) > MOST_MOMENTS:
        raise ValueError(
            f"{len(rows):,} copies of records at one client: sums of moments are exact for "
            f"{MOST_MOMENTS:,} at most; use fewer copies"
        )
    squares = records.inner.diagonal(dim1=1, dim2=2).flatten() - _INPUT**-2  # without the bias
    lengths = _sqrt(squares.clamp_min_(1))
    # Of copies, the parts are added: a mean of integers need not be one.
    length_of_moments = ROOM * _LENGTH * math.sqrt(norms[0] / copies)
    length_of_sums = ROOM * _SUM * norms[1] / copies
    count = math.trunc(ROOM * _SUM * norms[2] / copies)
    moments, sums = torch.zeros(size, size).double(), torch.zeros(num_classes, size).double()
    for part, length, label in zip(
        *(each.split(_MOMENTS_AT_ONCE) for each in (rows, lengths, labels)), strict=True
    ):
        whole = part.double()
        scaled = whole.mul((length_of_moments / length)[:, None]).trunc_()
        moments += scaled.T @ scaled
        sums.index_add_(0, label, whole.mul_((length_of_sums / length)[:, None]).trunc_())
    moments *= torch.full((size, size), OFF_DIAGONAL).fill_diagonal_(1.0)
    triangle = moments[*torch.triu_indices(size, size)]
    counts = torch.bincount(labels, minlength=num_classes).double() * count
    return torch.cat([triangle / _LENGTH**2, sums.flatten() / _SUM, counts / _SUM])


def of_moments(
    numbers: NDArray[np.float64], num_classes: int, norms: tuple[float, float, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the (D, D) sum of u u^T, the (K, D) sums of u and the (K,) counts of `moments_sum`."""
    # D^2 / 2 + (K + 1/2) D + K numbers
    half = num_classes + 0.5
    size = round(math.sqrt(half**2 + 2 * (len(numbers) - num_classes)) - half)
    triangle, sums, counts = np.split(numbers, [size * (size + 1) // 2, len(numbers) - num_classes])
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = triangle / norms[0]
    off = np.triu(upper, 1) / OFF_DIAGONAL
    moments = off + off.T + np.diag(upper.diagonal())
    return moments, sums.reshape(num_classes, size) / norms[1], counts / norms[2]


def _labels(labels: torch.Tensor, copies: int) -> torch.Tensor:
    """Return the (N * A,) labels of all copies, from (N,) record labels or (N, A) copy labels."""
    return _repeat(labels, copies) if labels.ndim == 1 else labels.flatten()


def _repeat(values: torch.Tensor, copies: int) -> torch.Tensor:
    """Repeat (N,) values for all copies; return (N * A,) values."""
    return values.repeat_interleave(copies) if copies > 1 else values


def _logits(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """Compute (K, R) float32 logits as exact products of each row with rounded weights.

    Each column depends only on its row. The unit of the weights depends on the largest row of
    weights, which is public.
    """
    most, size = _LARGEST_EXACT // 2**7, rows.shape[1]
    length = max(float(layer.weight.abs().sum(1).max()), 1e-30)
    unit = length / (most - size)
    products = layer.weight.div(unit).round_() @ rows.T
    return products.mul_(unit * _INPUT).add_(layer.bias[:, None])


def _residuals(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Subtract one-hot labels from probabilities; return (K, R) integers up to 2^20, unit 2^-20.

    Exponentials are read from a table of integers, so their sum is exact.
    """
    table = _exponentials()
    logits -= logits.amax(0)
    places = logits.mul_(-_STEPS).clamp_(max=len(table) - 1).nan_to_num_(0.0).int()
    probabilities = table.index_select(0, places.flatten()).view_as(logits)
    probabilities /= probabilities.sum(0, dtype=torch.float64).float()
    residuals = probabilities.mul_(1 / _RESIDUAL).round_()
    residuals[labels, torch.arange(len(labels))] -= 1 / _RESIDUAL
    return residuals


@functools.cache
def _exponentials() -> torch.Tensor:
    """Tabulate rounded 2^20 exp(-(i + 1/2) / 1024), for i from 0 until it rounds to zero."""
    places = torch.arange(15 * _STEPS, dtype=torch.float64) + 0.5
    return (torch.exp(-places / _STEPS) / _RESIDUAL).round().float()


def _scale(residuals: torch.Tensor, inner: torch.Tensor, bound: float) -> torch.Tensor:
    """Compute (N,) float64 factors for (K, N * A) residuals that keep each record in its bound.

    A factor depends on the norm of the mean of a record's copies. If copies cancel each other by
    more than CANCELLATION, it uses their mean length divided by CANCELLATION instead. Truncating
    residuals towards zero does not lengthen a single copy's gradient. The sum of several copies may
    grow by one unit per copy, so its bound is reduced.
    """
    copies, classes = inner.shape[1], len(residuals)
    unit = _RESIDUAL * _INPUT
    if copies == 1:
        squares = residuals.double().square_().sum(0)
        norm = _sqrt(squares.mul_(inner[:, 0, 0])).mul_(unit)
        return norm.clamp_min_(bound).reciprocal_().mul_(ROOM)
    exact = residuals.T.unflatten(0, (-1, copies)).double()
    products = (exact @ exact.mT) * inner
    lengths = _sqrt(products.diagonal(dim1=1, dim2=2))
    # Copies are added number by number, in the same order for every record.
    total = functools.reduce(torch.add, products.flatten(1).unbind(1))
    length = functools.reduce(torch.add, lengths.unbind(1)) / copies
    norm = torch.maximum(_sqrt(total.clamp_min(0)) / copies, length / CANCELLATION) * unit
    reach = _sqrt(functools.reduce(torch.maximum, inner.diagonal(dim1=1, dim2=2).unbind(1)))
    room = (ROOM - reach * (copies * _INPUT * _RESIDUAL * classes**0.5)).clamp_min(0)
    scale: torch.Tensor = room / (norm.clamp_min(bound) * copies)
    return scale


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    """Take correctly rounded square roots; torch may use MKL, which does not round correctly."""
    return torch.from_numpy(np.sqrt(values.numpy()))


# --- networks ---------------------------------------------------------------------------------


def single_gradients(
    model: "GradSampleModule", inputs: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    """Compute each record's cross-entropy gradient (the mean over its copies) and its norm.

    A number that is not finite counts as zero.

    Args:
        model: the model; Opacus computes its gradients for each record.
        inputs: (B, A, ...).
        labels: (B,), or (B, A) if copies have their own labels.

    Returns:
        A (B, ...) float32 array per parameter, followed by the (B,) float64 L2 norms over all
        parameters.
    """
    count, copies = inputs.shape[:2]
    logits = model(inputs.flatten(0, 1))
    loss = nn.functional.cross_entropy(logits, _labels(labels, copies), reduction="sum")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # as expected
        loss.backward()
    gradients = []
    for parameter in model.parameters():
        each = parameter.grad_sample.unflatten(0, (count, copies))
        each = each.mean(1) if copies > 1 else each[:, 0]
        gradients.append(each.nan_to_num_(0.0, 0.0, 0.0))
    model.zero_grad(set_to_none=True)
    return append_norms(gradients)


def append_norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Append the (B,) float64 L2 norms of B records' gradients over all parameters."""
    norms = [torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64) for g in gradients]
    return [*gradients, torch.linalg.vector_norm(torch.stack(norms), dim=0)]


def clip(gradients: list[torch.Tensor], bound: float) -> list[torch.Tensor]:
    """Clip gradients of `single_gradients` to L2 norm `bound` and truncate them towards zero.

    Returns:
        (B, ...) float32 integers for each parameter, in units of UNIT * `bound`; a record's numbers
        have norm at most 1 / UNIT.
    """
    *parts, norm = gradients
    scale = (ROOM / UNIT / norm.clamp_min(bound)).float()
    return [part.mul_(scale.view(-1, *[1] * (part.ndim - 1))).trunc_() for part in parts]


def pad(inputs: torch.Tensor, labels: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a part of a batch with zeros after its records, to `size` rows.

    The order of additions in kernels depends on the batch's shape, so all parts get the same shape.
    """
    missing = size - len(labels)
    return (
        torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])]),
        torch.cat([labels, labels.new_zeros(missing, *labels.shape[1:])]),
    )


def places_agree(
    function: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]],
    inputs: torch.Tensor,
    size: int,
) -> bool:
    """Return whether a record's result has the same bits at every position among `size` records.

    The order of a kernel's operations depends on shapes and positions, not on values. So this
    compares results for random records, not a client's, before and after shifting them by one
    position, and the first record's results among different records (`with_others`). An all-zero
    result is inconclusive and counts as a disagreement.

    Args:
        function: maps records and labels to (B, ...) unrounded results; each should depend only on
            its record.
        inputs: example with the records' shapes; the number of records may differ.
        size: B.
    """
    rng = torch.Generator().manual_seed(0)
    others = with_others(torch.rand((size, *inputs.shape[1:]), generator=rng))
    records = next(others)
    labels = torch.arange(size) % 2
    results = function(records, labels)
    shifted = function(records.roll(1, 0), labels.roll(1, 0))
    return all(
        bool(a.any()) and torch.equal(a.roll(1, 0), b)
        for a, b in zip(results, shifted, strict=True)
    ) and all(
        torch.equal(a[0], b[0])
        for other in others
        for a, b in zip(results, function(other, labels), strict=True)
    )


def with_others(records: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield batches of (B, ...) records in [0, 1] with the same first record among others.

    The first has a narrow range, so the others decide the extremes. They are random, mirrored
    (which keeps their absolute values around 0.5), narrowed, rounded, all one and all zero.
    """
    first, rest = 0.4 + 0.2 * records[:1], records[1:]
    yield torch.cat([first, rest])
    yield torch.cat([first, 1 - rest])
    yield torch.cat([first, 0.4 + 0.2 * rest])
    yield torch.cat([first, rest.round()])
    yield torch.cat([first, torch.ones_like(rest)])
    yield torch.cat([first, torch.zeros_like(rest)])
