"""Sums of clipped gradients: no record moves a sum by more than its bound, whatever the rounding.

The control adds the same gradients in float32; the same searches catch it.
"""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS, NO_DP_SGD
from fed_dpsd.models.torchvision_networks import GROUP_FORMS
from fed_dpsd.privacy import dp_sgd, lattice
from fed_dpsd.privacy.dp_sgd import DPSGD
from tests.every import every

BOUND = 1.0


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def units(parts):
    """A sum as whole multiples of UNIT, which it must be; in (P,) integers."""
    flat = np.concatenate([part.numpy().ravel() for part in parts]) / lattice.UNIT
    assert (flat == np.round(flat)).all()
    return flat.astype(np.int64)


def norm(difference):
    """The L2 norm of whole multiples of UNIT, in bounds; only its root is rounded."""
    assert np.abs(difference).max(initial=0) < 2**29
    return math.sqrt(int(np.square(difference).sum())) * lattice.UNIT


def exact_sum(layer, inputs, labels):
    with torch.no_grad():
        return units(lattice.linear_sum(layer, lattice.Rows.of(inputs, labels), BOUND))


def float32_sum(layer, inputs, labels, columns=1):
    """The control, (K, D): clipped in float64, then added in float32, one after the other.

    Each of the D inputs represents `columns` equal inputs.
    """
    with torch.no_grad():
        residuals = layer(inputs).softmax(2).double()
        residuals -= nn.functional.one_hot(labels, layer.out_features)[:, None]
        parts = torch.einsum("nak,nad->nkd", residuals, inputs.double()) / inputs.shape[1]
    lengths = (parts.flatten(1).norm(dim=1) * columns**0.5).clamp_min(BOUND)
    clipped = (parts / lengths[:, None, None]).float().numpy()
    return np.add.accumulate(clipped, axis=0)[-1] if len(clipped) else np.zeros(parts.shape[1:])


# --- the counterexamples of float32 ---


def two_groups(classes, power, small):
    """A layer that is sure of class 0, and two groups of records whose inputs are all 1.

    The float32 sum over the records of class 1, the large group, first reaches 2^power with the
    last of them. Each of the `small` records of class 0 subtracts just under half a unit in the
    last place there, so it is rounded away; below 2^power it rounds to a whole unit.

    Returns:
        The layer, (N, 1, 512) inputs, (N,) labels, and how many the large group has.
    """
    off = 2.0 ** (power - 24) * (1 - 2**-6)  # of 1, the probability of class 0
    layer = nn.Linear(512, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    with torch.no_grad():
        layer.bias[0] = math.log((classes - 1) * (1 - off) / off)
    step = np.float32(1 / math.sqrt(2 * 513))
    large = int(np.argmax(np.add.accumulate(np.full(2**16, step)) >= 2.0**power)) + 1
    labels = torch.tensor([1] * large + [0] * small)
    return layer, torch.ones(len(labels), 1, 512), labels, large


@every(
    ("classes", "power", "records", "moved"),
    [(2, 6, 4_050, 1.24), (2, 7, 10_100, 2.46), (2, 9, 28_400, 12.7), (10, 7, 12_100, 1.2)],
)
def test_a_record_moves_a_long_sum_by_no_more_than_its_bound(classes, power, records, moved):
    """Add or remove one record of the large group; all columns of the control are equal."""
    large = two_groups(classes, power, 0)[3]
    layer, inputs, labels, _ = two_groups(classes, power, records - large)
    column = nn.Linear(1, classes)
    column.weight, column.bias = nn.Parameter(layer.weight[:, :1]), layer.bias
    control = float32_sum(column, inputs[:, :, :1], labels, 513).astype(float)
    control -= float32_sum(column, inputs[1:, :, :1], labels[1:], 513)
    assert np.linalg.norm(control) * 513**0.5 > moved > 1
    difference = exact_sum(layer, inputs, labels) - exact_sum(layer, inputs[1:], labels[1:])
    assert (difference == exact_sum(layer, inputs[:1], labels[:1])).all()
    assert 0.999 < norm(difference) <= 1


# --- a search for others ---


def some_world(seed):
    """A random layer and data set: 2 to 20 classes, 1 to 3 copies, margins of all sizes."""
    rng = np.random.Generator(np.random.PCG64(seed))
    classes, copies, features = rng.integers(2, 21), rng.integers(1, 4), rng.integers(1, 200)
    count = int(2 ** rng.uniform(0, 11))
    layer = nn.Linear(int(features), int(classes))
    with torch.no_grad():
        for parameter in layer.parameters():
            scale = 10 ** rng.uniform(-3, 2)
            parameter.copy_(torch.from_numpy(scale * rng.normal(size=parameter.shape)))
    kinds = rng.normal(size=(4, copies, features)) * 10 ** rng.uniform(-2, 1.5, (4, 1, 1))
    if rng.random() < 0.5:  # copies that cancel each other
        kinds[:, 1:] = -kinds[:, :1]
    inputs = kinds[rng.integers(4, size=count)]  # records that repeat carry furthest
    labels = rng.integers(classes, size=count)
    return layer, torch.from_numpy(inputs).float(), torch.from_numpy(labels), rng


@pytest.mark.usefixtures("_threads")
def test_no_record_of_random_data_moves_a_sum_by_more_than_its_bound():
    """Removed, added, replaced, reordered: the difference is the record's own part."""
    control = 0
    for seed in range(60):
        layer, inputs, labels, rng = some_world(seed)
        total = exact_sum(layer, inputs, labels)
        order = torch.from_numpy(rng.permutation(len(labels)))
        assert (exact_sum(layer, inputs[order], labels[order]) == total).all()
        gone = int(rng.integers(len(labels)))
        rest = torch.arange(len(labels)) != gone
        own = exact_sum(layer, inputs[[gone]], labels[[gone]])
        assert norm(own) <= 1
        assert (total - exact_sum(layer, inputs[rest], labels[rest]) == own).all()
        moved = float32_sum(layer, inputs, labels) - float32_sum(layer, inputs[rest], labels[rest])
        alone = float32_sum(layer, inputs[[gone]], labels[[gone]])
        control += (moved != alone).any()
    assert control > 30


@every("value", [math.nan, math.inf, -math.inf])
@every("copies", [1, 3])
def test_a_record_that_is_not_finite_counts_as_zero(value, copies):
    inputs = torch.ones(1, copies, 5)
    inputs[0, -1, 2] = value
    assert not exact_sum(nn.Linear(5, 3), inputs, torch.tensor([1])).any()


def test_weights_that_are_not_finite_leave_a_record_within_its_bound():
    for value in (math.nan, math.inf, 3e38):
        layer = nn.Linear(5, 3)
        with torch.no_grad():
            layer.weight[1, 2] = value
        own = exact_sum(layer, torch.ones(1, 1, 5), torch.tensor([1]))
        assert norm(own) <= 1
        seven = exact_sum(layer, torch.ones(7, 1, 5), torch.tensor([1] * 7))
        assert (seven == 7 * own).all()


def test_roots_are_correctly_rounded():
    """Torch's own differ from the nearest number if they use the MKL."""
    values = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).random(20_000)) * 1e9
    assert lattice._sqrt(values).tolist() == [math.sqrt(value) for value in values.tolist()]


def test_sizes_that_sums_are_not_exact_for_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="4,097 inputs of a linear layer.*4,096 at most"):
        lattice.Rows.of(torch.zeros(1, 1, 4_097), torch.zeros(1))
    monkeypatch.setattr(lattice, "MOST_ROWS", 5)
    with pytest.raises(ValueError, match="6 copies of records at one teacher.*teachers_per_client"):
        lattice.Rows.of(torch.zeros(2, 3, 1), torch.zeros(2))


def test_the_largest_numbers_are_held_exactly():
    """The promises of the module's constants for float32 and float64, by their own arithmetic."""
    assert lattice._LARGEST_INPUT * (2**17 + 2) < 2**24  # a row of weights and one of inputs
    # A copy's residual is at most CANCELLATION over the length of its input.
    half = lattice.CANCELLATION * 2**10 * 16 + lattice._LARGEST_INPUT
    assert lattice._ROWS_AT_ONCE * half <= 2**24
    assert lattice._ROWS_AT_ONCE * lattice._HALF // 2 * lattice._LARGEST_INPUT <= 2**24
    assert lattice.MOST_ROWS * lattice.CANCELLATION / lattice.UNIT <= 2**53


# --- networks ---

LARGE = {"alexnet", "vit_b", *GROUP_FORMS.values()}  # tests/models/test_torchvision_networks.py
NETWORKS = sorted(set(CLASSIFIERS) - set(NO_DP_SGD) - {"scattering"} - LARGE)


def seen_sums(monkeypatch, mechanism, build, inputs, labels):
    """The single sum, in units, to which training of one step adds noise."""
    seen = []
    monkeypatch.setattr(
        DPSGD, "_noisy", lambda self, total, size, rng: (seen.append(total), total.float())[1]
    )
    model = initialise(build, torch.Generator().manual_seed(0))
    mechanism.train(model, inputs, labels, np.random.Generator(np.random.PCG64(0)))
    return units(seen)


TRAINED = [name for name in NETWORKS if name != "patches"]  # which takes seconds to fit


@every(("name", "copies"), [(name, 1 + number % 2) for number, name in enumerate(TRAINED[::4])])
def test_a_record_moves_the_sum_of_a_network_by_its_own_part(monkeypatch, name, copies):
    """An added record shifts all later ones, and starts another part of the batch."""
    moves_the_sum_by_its_own_part(monkeypatch, name, copies)


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
@every("name", NETWORKS)
@every("copies", [1, 2])
def test_a_record_moves_the_sum_of_any_network_on_any_threads(monkeypatch, name, copies):
    moves_the_sum_by_its_own_part(monkeypatch, name, copies)


def moves_the_sum_by_its_own_part(monkeypatch, name, copies):
    monkeypatch.setattr(dp_sgd, "RECORDS_AT_ONCE", 8)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand((dp_sgd.RECORDS_AT_ONCE + 1, copies, 1, 8, 8), generator=generator)
    labels = torch.arange(len(inputs)) % 10
    build = functools.partial(CLASSIFIERS[name], (1, 8, 8), 10, 4)
    mechanism = DPSGD(1.0, 1.0, 1, 1e-2, 0.1, copies)
    add = functools.partial(seen_sums, monkeypatch, mechanism, build)
    both, rest, own = add(inputs, labels), add(inputs[1:], labels[1:]), add(inputs[:1], labels[:1])
    assert (both - rest == own).all()
    assert 0.99 < norm(own) <= 1


@pytest.mark.slow
@every("name", NETWORKS)
def test_the_gradients_of_a_network_are_its_own(name):
    """Compared with autograd, record by record, on colour images; a mean over two copies."""
    build = functools.partial(CLASSIFIERS[name], (3, 16, 16), 10, 4)
    plain = initialise(build, torch.Generator().manual_seed(0))
    inputs = torch.rand((3, 2, 3, 16, 16), generator=torch.Generator().manual_seed(1))
    inputs = inputs.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, (3, 2))
    labels = torch.arange(3)
    expected = []
    for record, label in zip(inputs, labels, strict=True):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(record), label.repeat(2)).backward()
        flat = torch.cat([p.grad.flatten() for p in plain.parameters()]).double()
        expected.append(flat / flat.norm())
    seen = []

    def watched(gradients, bound):
        seen.append(clipped(gradients, bound))
        return seen[-1]

    clipped = lattice.clip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattice, "clip", watched)
        model = initialise(build, torch.Generator().manual_seed(0))
        rng = np.random.Generator(np.random.PCG64(0))
        DPSGD(1.0, 1.0, 1, 1e-3, 0.1, 2).train(model, inputs, labels, rng)
    *_, last = seen
    for number, gradient in enumerate(expected):
        flat = torch.cat([g[number].flatten() for g in last]).double() * lattice.UNIT
        assert flat.numpy() == pytest.approx(gradient.numpy(), abs=1e-4)


def test_the_norm_of_a_wide_network_is_one_of_float64(monkeypatch):
    """If squares are added in float32, the control, a record exceeds its bound."""
    monkeypatch.setattr(dp_sgd, "RECORDS_AT_ONCE", 2)
    build = functools.partial(CLASSIFIERS["lenet"], (3, 32, 32), 10, 16)
    image = torch.rand((1, 1, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    add = functools.partial(seen_sums, monkeypatch, DPSGD(1.0, 1.0, 1, 1e-2, 0.1), build)
    assert 0.999 < norm(add(image, torch.tensor([3]))) <= 1

    def float32_norm(values, dim, dtype=None):
        largest_first = values.square().float().sort(dim=dim, descending=True).values.numpy()
        added = np.add.accumulate(largest_first, axis=dim)
        return torch.from_numpy(added.take(-1, axis=dim)).sqrt().double()

    monkeypatch.setattr(torch.linalg, "vector_norm", float32_norm)
    assert norm(add(image, torch.tensor([3]))) > 1


def test_kernels_that_know_places_are_found():
    """Also if the difference is far below the unit of a clipped gradient; zeros reveal nothing."""

    def by_place(inputs, labels):
        return [inputs + torch.arange(len(inputs))[:, None] * 1e-7]

    def by_itself(inputs, labels):
        return [inputs.square()]

    def nothing(inputs, labels):
        return [inputs * 0]

    def by_largest(inputs, labels):
        return [inputs + inputs.max()]

    def by_range(inputs, labels):  # which mirroring the other records around 0.5 keeps
        return [inputs / (inputs - 0.5).abs().max()]

    def by_energy(inputs, labels):
        return [inputs / (inputs - 0.5).square().mean()]

    assert not lattice.places_agree(by_place, torch.zeros(2, 5), 8)
    assert not lattice.places_agree(nothing, torch.zeros(2, 5), 8)
    assert not lattice.places_agree(by_largest, torch.zeros(2, 5), 8)
    assert not lattice.places_agree(by_range, torch.zeros(2, 5), 8)
    assert not lattice.places_agree(by_energy, torch.zeros(2, 5), 8)
    assert lattice.places_agree(by_itself, torch.zeros(2, 5), 8)


@every("bound", [1e-2, 1e5])
def test_one_by_one_a_record_moves_the_sum_of_a_network_by_its_own_part(monkeypatch, bound):
    """As for kernels that depend on places, as for some odd widths on some processors."""
    monkeypatch.setattr(lattice, "places_agree", lambda *_: False)
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand((9, 1, 1, 28, 28), generator=generator), torch.arange(9)
    build = functools.partial(CLASSIFIERS["cnn"], (1, 28, 28), 10, 3)
    add = functools.partial(seen_sums, monkeypatch, DPSGD(1.0, 1.0, 1, bound, 0.1), build)
    both, rest, own = add(inputs, labels), add(inputs[1:], labels[1:]), add(inputs[:1], labels[:1])
    assert own.any()
    assert (both - rest == own).all()


def test_records_one_by_one_have_the_sum_of_parts(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand((5, 1, 1, 8, 8), generator=generator), torch.arange(5)
    build = functools.partial(CLASSIFIERS["cnn"], (1, 8, 8), 10, 4)
    add = functools.partial(seen_sums, monkeypatch, DPSGD(1.0, 1.0, 1, 1e-2, 0.1), build)
    together = add(inputs, labels)
    monkeypatch.setattr(lattice, "places_agree", lambda *_: False)
    apart = add(inputs, labels)
    assert np.abs(together - apart).max() * lattice.UNIT < 1e-4
