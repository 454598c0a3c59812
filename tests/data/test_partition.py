"""Partitions: disjoint, exhaustive, reproducible, by patient, and clear about what is left out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fed_dpsd.data import partition
from fed_dpsd.data.partition import IID, ByClass, Coins, Counts, Dirichlet, split
from fed_dpsd.errors import UserError

LABELS = np.repeat(np.arange(10), 140)


def check(shares, total):
    joined = np.concatenate(shares)
    assert len(np.unique(joined)) == len(joined)
    assert joined.min() >= 0
    assert joined.max() < total
    assert min(len(share) for share in shares) > 0


@given(
    num_clients=st.integers(1, 8),
    alpha=st.sampled_from([0.1, 0.5, 10.0]),
    seed=st.integers(0, 5),
    balancing=st.booleans(),
)
@settings(derandomize=True, max_examples=15, deadline=None)
def test_dirichlet_shares_are_disjoint_and_exhaustive(num_clients, alpha, seed, balancing):
    shares = split(Dirichlet(seed, alpha, balancing, 1), LABELS, num_clients)
    check(shares, len(LABELS))
    assert sum(len(share) for share in shares) == len(LABELS)
    assert len(shares) == num_clients


def test_iid_shares_are_equal_and_shuffled():
    shares = split(IID(0), LABELS, 5)
    check(shares, len(LABELS))
    assert {len(share) for share in shares} == {280}
    assert all(len(np.unique(LABELS[share])) == 10 for share in shares)


def test_by_class_shares_hold_so_many_classes():
    for classes in (1, 3):
        shares = split(ByClass(0, classes), LABELS, 5)
        check(shares, len(LABELS))
        assert all(len(np.unique(LABELS[share])) == classes for share in shares)


def test_counts_are_given_exactly_and_drawn_at_random():
    """Records of no client are left out, and one client may lack a class."""
    wanted = np.array([[10] * 10, [100] * 10, [0] + [30] * 9])
    rule = Counts(0, tuple(map(tuple, wanted.tolist())))
    shares = split(rule, LABELS, 3)
    check(shares, len(LABELS))
    assert [np.bincount(LABELS[s], minlength=10).tolist() for s in shares] == wanted.tolist()
    assert "30 have none, left out by partition.counts" in partition.unused_records(
        rule, LABELS, shares
    )
    assert len(split(Counts(0, ((10,) * 10,)), LABELS, 1)[0]) == 100
    other = split(replace(rule, seed=1), LABELS, 3)
    assert not np.array_equal(shares[0], other[0])


def test_counts_that_the_data_or_the_clients_do_not_allow_are_named(small):
    with pytest.raises(UserError, match="clients 0 to 1 get 141 of the 140 records or patients of"):
        split(Counts(0, ((140,) * 10, (1,) * 10)), LABELS, 2)
    with pytest.raises(ValueError, match=r"counts has \[0, 0\]; give numbers >= 0, and one above"):
        Counts(0, ((0, 0), (1, 1)))
    with pytest.raises(
        UserError, match=r"partition.counts=\[\] must have num_clients=2 lists, each"
    ):
        small("partition=counts", "num_clients=2")


RULES = [Dirichlet(0, 0.5, False, 10), IID(0), ByClass(0, 2)]


def test_one_client_holds_all_records_whatever_their_labels():
    """An error about few records, or about missing classes, would depend on labels."""
    coins = Coins(0, 1, 0.5)
    for number in (0, 3, 1_400):
        for rule in RULES:
            (share,) = split(rule, LABELS[:number], 1)
            assert share.tolist() == list(range(number)), rule
        (kept,) = split(coins, LABELS[:number], 1)
        assert kept.tolist() == np.flatnonzero(coins.kept(number)).tolist()


def test_a_coin_leaves_its_record_out_and_touches_no_other():
    """Coins are fair within four standard errors; another coin seed moves no records."""
    holders = split(IID(0), LABELS, 5)
    for coins in range(3):
        rule = Coins(seed=0, coins=coins, fraction=0.5)
        shares, kept = split(rule, LABELS, 5), rule.kept(len(LABELS))
        check(shares, len(LABELS))
        assert all(
            np.array_equal(share, holder[kept[holder]])
            for share, holder in zip(shares, holders, strict=True)
        )
        assert kept.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(len(LABELS)))
    tossed = [Coins(0, coins, 0.5).kept(len(LABELS)) for coins in (0, 1)]
    assert 0.4 < (tossed[0] != tossed[1]).mean() < 0.6
    assert Coins(0, 0, 1.0).kept(len(LABELS)).all()


def test_coins_need_a_chance():
    for fraction in (0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="fraction\n"):
            Coins(seed=0, coins=0, fraction=fraction)


def test_equal_seeds_give_equal_shares():
    for rule in RULES:
        first, again = split(rule, LABELS, 4), split(rule, LABELS, 4)
        assert all((a == b).all() for a, b in zip(first, again, strict=True))
        other = split(replace(rule, seed=4), LABELS, 4)
        assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, other, strict=True))


def test_too_many_clients_is_an_error_that_names_a_number_that_works():
    for rule in RULES:
        with pytest.raises(UserError, match=r"num_clients=150.*num_clients=\d+ works") as caught:
            split(rule, LABELS[::10], 150)
        feasible = int(str(caught.value).split("num_clients=")[2].split()[0])
        assert len(split(rule, LABELS[::10], feasible)) == feasible


def test_an_impossible_minimum_is_said():
    with pytest.raises(UserError, match="no number of clients works.*min_partition_size"):
        split(Dirichlet(0, 0.5, False, 10_000), LABELS, 2)


def test_a_partition_is_split_once_and_read_after(tmp_path, monkeypatch):
    """Another rule, other labels or another number of clients gets a new split."""
    labels = np.random.default_rng(0).integers(0, 10, 500)
    rule = Dirichlet(0, 0.5, False, 1)
    first = partition.load_or_split(rule, labels, 3, tmp_path)
    assert [part.tolist() for part in first] == [p.tolist() for p in split(rule, labels, 3)]
    called = []
    monkeypatch.setattr(partition, "split", lambda *given: called.append(given) or first)
    again = partition.load_or_split(rule, labels, 3, tmp_path)
    assert [part.tolist() for part in again] == [part.tolist() for part in first]
    assert not called
    others = [(Dirichlet(1, 0.5, False, 1), labels, 3), (rule, labels[::-1].copy(), 3)]
    for other in (*others, (rule, labels, 2)):
        partition.load_or_split(*other, tmp_path)
    assert len(called) == 3
    patients = np.arange(500) // 2
    for known in (patients, patients[::-1].copy(), patients):
        partition.load_or_split(rule, labels, 3, tmp_path, known)
    assert len(called) == 5


# --- patients ---


def families(seed, number=300, most=6):
    """Labels and patients, in no order, of patients of one to `most` records each."""
    rng = np.random.default_rng(seed)
    patients = np.repeat(rng.integers(-(2**62), 2**62, number), rng.integers(1, most + 1, number))
    order = rng.permutation(len(patients))
    return rng.integers(0, 4, len(patients)), patients[order]


def scattered(shares, patients):
    """How many patients have records at several clients."""
    homes = [set(patients[share].tolist()) for share in shares]
    return sum(map(len, homes)) - len(set().union(*homes))


@given(
    rule=st.sampled_from([Dirichlet(0, 0.5, False, 5), IID(0), ByClass(0, 2), ByClass(0, 4)]),
    num_clients=st.integers(2, 5),
    seed=st.integers(0, 9),
)
@settings(derandomize=True, max_examples=15, deadline=None)
def test_a_patients_records_are_at_one_client(rule, num_clients, seed):
    labels, patients = families(seed)
    shares = split(rule, labels, num_clients, patients)
    check(shares, len(labels))
    assert all((np.diff(share) > 0).all() for share in shares)
    assert scattered(shares, patients) == 0
    whole = np.isin(patients, patients[np.concatenate(shares)]).sum()
    assert sum(map(len, shares)) == whole  # all records of each patient who is at a client
    if rule != ByClass(0, 2):
        assert whole == len(labels)
    assert scattered(split(rule, labels, num_clients), patients) > 0  # the control: records dealt


def test_patients_are_dealt_by_their_most_frequent_class_the_smaller_of_two():
    """Client j of `ByClass(0, 1)` has the patients of class j, in any order of records."""
    patients = np.array([7, 7, 7, -3, -3, -3, -3, 5, 4])
    labels = np.array([1, 1, 0, 2, 1, 2, 1, 2, 0])
    parts = split(ByClass(0, 1), labels, 3, patients)
    assert [sorted(set(patients[part].tolist())) for part in parts] == [[4], [-3, 7], [5]]


def test_who_holds_a_patient_follows_no_order_of_records_and_no_label_but_the_most_frequent():
    """Docs/mechanisms.md: a record that is relabelled moves a patient only by their majority."""
    labels, patients = families(0, number=60)
    labels = np.where(np.arange(len(labels)) % 3 == 0, labels, patients % 4)

    def homes(rule, labels, patients):
        shares = split(rule, labels, 3, patients)
        return [sorted(set(patients[share].tolist())) for share in shares]

    order = np.random.default_rng(1).permutation(len(labels))
    counts = np.array([np.bincount(labels[patients == each], minlength=4) for each in patients])
    lead = np.sort(counts)[:, -1] - np.sort(counts)[:, -2]
    safe = np.flatnonzero((lead > 2) & (labels == counts.argmax(1)))[0]
    for rule in (Dirichlet(0, 0.5, False, 1), IID(0), ByClass(0, 2)):
        before = homes(rule, labels, patients)
        assert homes(rule, labels[order], patients[order]) == before
        relabelled = labels.copy()
        relabelled[safe] = (labels[safe] + 1) % 4
        assert homes(rule, relabelled, patients) == before
        relabelled[patients == patients[safe]] = (labels[safe] + 1) % 4
        assert (homes(rule, relabelled, patients) == before) == isinstance(rule, IID)


def test_a_smallest_size_and_its_error_count_patients():
    labels, patients = np.arange(200) % 2, np.arange(200) // 10  # twenty patients
    assert len(split(Dirichlet(0, 100.0, False, 5), labels, 2, patients)) == 2
    with pytest.raises(UserError, match="enough of the 20 patients; num_clients=1 works here"):
        split(Dirichlet(0, 100.0, False, 11), labels, 2, patients)
    remedies = {
        (False, 11): "works here; a smaller .* or partition.self_balancing=true or partition=iid",
        (True, 11): r"works here; a smaller .*\(now 11\) or partition=iid may allow more",
    }
    for (balanced, size), remedy in remedies.items():
        with pytest.raises(UserError, match=remedy):
            split(Dirichlet(0, 100.0, balanced, size), labels, 2, patients)
    assert len(split(Dirichlet(0, 100.0, False, 11), labels, 2)) == 2  # records are enough
    with pytest.raises(UserError, match="of the 20 patients; num_clients=20 works here"):
        split(IID(0), labels, 21, patients)


def test_coins_leave_records_out_and_move_no_patient():
    """Coins are of records, whose epsilon attacks compare with (Theorem 21)."""
    labels, patients = families(0)
    holders = split(IID(0), labels, 3, patients)
    rule = Coins(seed=0, coins=1, fraction=0.5)
    kept = rule.kept(len(labels))
    shares = split(rule, labels, 3, patients)
    for share, holder in zip(shares, holders, strict=True):
        assert share.tolist() == holder[kept[holder]].tolist()
    halves = [kept[patients == each].mean() for each in np.unique(patients)]
    assert 0 < np.median(halves) < 1


# --- records of no client ---


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("rule", [ByClass(0, 2), IID(0)])
def test_records_of_no_client_are_counted_with_a_remedy_that_works(rule, known):
    labels, patients = families(0)
    patients = patients if known else None
    shares = split(rule, labels, 2, patients)
    said = partition.unused_records(rule, labels, shares, patients)
    assert bool(said) == isinstance(rule, ByClass) == (sum(map(len, shares)) < len(labels))
    if said:
        held = sum(map(len, shares))
        assert f": {held:,} of {len(labels):,} training records have a client; " in said
        assert f"; {len(labels) - held:,} have none, because 1 of 4 classes have no client" in said
        assert said.endswith("raise the first to 3, or the second to 3")
        for wider, clients in ((ByClass(0, 3), 2), (rule, 3)):
            shares = split(wider, labels, clients, patients)
            assert partition.unused_records(wider, labels, shares, patients) == ""


def test_records_that_coins_leave_out_are_counted():
    rule = Coins(seed=0, coins=1, fraction=0.25)
    shares = split(rule, LABELS, 3)
    held = int(rule.kept(1_400).sum())
    assert partition.unused_records(rule, LABELS, shares) == (
        f"partition: {held} of 1,400 training records have a client; {1_400 - held:,} have "
        "none, left out by their coins (partition.fraction=0.25)"
    )
