"""Secure sums: exact despite dropouts, uniform to observers, and safe from a malicious server."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fed_dpsd.privacy import secure_sum
from fed_dpsd.privacy.secure_sum import Party, SumError, combine, public_key
from tests.every import every

TAG = b"run 1, ask 2"


def parties(count=5, threshold=3):
    private = [bytes([number + 1]) * 32 for number in range(count)]
    public = {number: public_key(key) for number, key in enumerate(private)}
    return [Party(number, key, public, threshold) for number, key in enumerate(private)]


def values(number, size=(4, 3)):
    rng = np.random.Generator(np.random.PCG64(number))
    return rng.integers(-(2**50), 2**50, size)


def unmask(members, masked, helpers, tag=TAG, named=None):
    named = sorted(masked) if named is None else named
    proofs = {number: members[number].confirm(tag, named) for number in named}
    return {
        number: members[number].unmask(
            tag,
            named,
            {other: proofs[other][number] for other in named},
            {other: masked[other].sealed[number] for other in named},
        )
        for number in helpers
    }


@every("lost_first", range(3))
@every("lost_later", range(3))
def test_the_sum_is_exact_if_parties_drop_out(lost_first, lost_later):
    """Up to as many dropouts as leave `threshold` parties; the control: with one more, it fails."""
    members = parties()
    masked = {number: members[number].mask(values(number), TAG) for number in range(5)}
    for left in itertools.islice(itertools.combinations(range(5), 5 - lost_first), 4):
        arrived = {number: masked[number] for number in left}
        helpers = left[lost_later:]
        if len(helpers) < 3:
            with pytest.raises(SumError, match="3 are needed"):
                combine(arrived, unmask(members, arrived, helpers), 5, 3)
            continue
        total = combine(arrived, unmask(members, arrived, helpers), 5, 3)
        assert (total == sum(values(number) for number in left)).all()


def test_a_masked_value_is_uniform_to_look_at():
    """Bytes and correlation with the value; the control: the value itself is not."""
    secret = np.full((20_000,), 7)
    seen = parties()[2].mask(secret, TAG).values
    as_bytes = np.bincount(seen.view(np.uint8), minlength=256)
    assert stats.chisquare(as_bytes).pvalue > 1e-6
    plain = np.bincount(secret.astype(np.uint64).view(np.uint8), minlength=256)
    assert stats.chisquare(plain).pvalue < 1e-6
    assert stats.kstest(seen / 2.0**64, "uniform").pvalue > 1e-6


def test_masks_are_new_for_each_sum():
    member = parties()[0]
    first, second = (member.mask(values(0), tag).values for tag in (TAG, b"another"))
    assert (first != second).all()
    again = member.mask(values(0), TAG).values  # its own mask is redrawn too
    assert (first != again).all()


def test_what_is_opened_leaves_another_partys_value_masked():
    """All masks are then known except the unnamed party's own, which hides its value."""
    members = parties()
    masked = {number: members[number].mask(values(number), TAG) for number in range(5)}
    arrived = {number: masked[number] for number in range(4)}
    opened = unmask(members, arrived, range(4))
    assert all(4 not in each.own for each in opened.values())
    late = masked | {4: masked[4]}
    with pytest.raises(KeyError):
        combine(late, opened, 5, 3)


def test_a_server_that_sends_parties_different_names_opens_nothing():
    """Each set of names is received by fewer parties than the threshold."""
    members = parties()
    masked = {number: members[number].mask(values(number), TAG) for number in range(5)}
    views = dict.fromkeys((0, 1), (0, 1, 2, 3)) | dict.fromkeys((2, 4), (0, 1, 2, 4))
    views[3] = (0, 1, 3, 4)
    proofs = {number: members[number].confirm(TAG, views[number]) for number in range(5)}
    for number in (0, 1):
        with pytest.raises(SumError, match="2 parties received these names; 3 are needed"):
            members[number].unmask(
                TAG,
                views[number],
                {o: proofs[o][number] for o in range(5)},
                {o: masked[o].sealed[number] for o in views[number]},
            )


def test_a_proof_is_for_one_sum_one_sender_and_one_receiver():
    members = parties()
    masked = {number: members[number].mask(values(number), TAG) for number in range(5)}
    names = range(5)
    proofs = {number: members[number].confirm(TAG, names) for number in names}
    sealed = {other: masked[other].sealed[0] for other in names}
    wrong = {
        "another receiver": {other: proofs[other][1] for other in names},
        "another sender": {other: proofs[(other + 1) % 5][0] for other in names},
        "another sum": {n: members[n].confirm(b"another", names)[0] for n in names},
        "nothing": {},
    }
    for given in wrong.values():
        with pytest.raises(SumError, match="parties received these names"):
            members[0].unmask(TAG, names, given, sealed)
    right = {other: proofs[other][0] for other in names}
    assert set(members[0].unmask(TAG, names, right, sealed).own) == set(names)


def test_tampered_shares_are_noticed():
    members = parties()
    masked = {number: members[number].mask(values(number), TAG) for number in range(5)}
    proofs = {number: members[number].confirm(TAG, range(5))[0] for number in range(5)}
    good = {other: masked[other].sealed[0] for other in range(5)}
    of_others = good[2], masked[0].sealed[3], members[3].mask(values(3), b"another").sealed[0]
    for bad in (b"", good[3][:-1], good[3][:-1] + bytes([good[3][-1] ^ 1]), *of_others):
        with pytest.raises(SumError, match="the shares of party 3 were tampered with"):
            members[0].unmask(TAG, range(5), proofs, good | {3: bad})


def test_who_is_not_named_or_one_of_too_few_does_not_take_part():
    member = parties()[0]
    with pytest.raises(SumError, match="2 parties are left; 3 are needed"):
        member.confirm(TAG, [0, 1])
    with pytest.raises(SumError, match=r"\[1, 2, 3\] lack party 0 or include"):
        member.confirm(TAG, [1, 2, 3])
    with pytest.raises(SumError, match=r"parties \[0, 1, 2, 9\]"):
        member.unmask(TAG, [0, 1, 2, 9], {}, {})


def test_a_server_that_puts_itself_between_two_parties_needs_their_keys():
    """Keys are known beforehand: with a swapped key the masks do not cancel."""
    members = parties(3, 2)
    swapped = dict(members[0].public_keys) | {1: public_key(b"x" * 32)}
    members[0] = Party(0, members[0].private_key, swapped, 2)
    masked = {number: members[number].mask(values(number), TAG) for number in range(3)}
    with pytest.raises(SumError, match="tampered with|received these names"):
        unmask(members, masked, range(3))


OWN = dict(parties()[0].public_keys)
FIELD = 2**255 - 19
COPIES = {
    "the same": lambda key: key,
    "another encoding": lambda key: key[:31] + bytes([key[31] | 128]),
    "a point of order 2 more": lambda key: pow(int.from_bytes(key, "little"), -1, FIELD).to_bytes(
        32, "little"
    ),
}


@every("copy", COPIES.values())
@every("numbered", [True, False])
def test_a_party_that_publishes_a_copy_of_anothers_key_exposes_nobody(copy, numbered, monkeypatch):
    """Party 2 claims 0's key as its own and drops out: its masks' keys are opened.

    The control: without the two numbers in a mask's key, they would equal the keys of 0's masks.
    """
    if not numbered:
        monkeypatch.setattr(
            Party,
            "_mask_key",
            lambda party, other, tag: secure_sum._derive(party._pairs[other], b"mask", tag),
        )
    private = [bytes([number + 1]) * 32 for number in range(5)]
    public = {number: public_key(key) for number, key in enumerate(private)}
    public[2] = copy(public[0])
    left = (0, 1, 3, 4)
    members = {number: Party(number, private[number], public, 4) for number in left}
    masked = {number: members[number].mask(values(number), TAG) for number in left}
    opened = unmask(members, masked, left)
    assert (combine(masked, opened, 5, 4) == sum(values(number) for number in left)).all()

    def joined(kind, name):
        return secure_sum._join({helper: getattr(opened[helper], kind)[name] for helper in left})

    found = masked[0].values.ravel() - secure_sum._stream(joined("own", 0), 12)
    found -= secure_sum._signed(0, 2, secure_sum._stream(joined("between", (0, 2)), 12))
    for other in (1, 3, 4):
        stream = secure_sum._stream(joined("between", (other, 2)), 12)
        found -= secure_sum._signed(0, other, stream)
    assert (found.astype(np.int64) == values(0).ravel()).all() != numbered


@every(
    ("change", "problem"),
    [
        ({"threshold": 2}, "threshold=2 must be above 2.5"),
        ({"threshold": 6}, "threshold=6 must be above 2.5 and at most 5"),
        ({"number": 1}, "public key of party 1 does not match"),
        ({"public_keys": {0: b"", 2: b""}}, "instead of 0 to 1"),
        ({"public_keys": OWN | {2: b"short"}}, "the public key of party 2 is invalid"),
        ({"public_keys": OWN | {2: bytes(32)}}, "the public key of party 2 is invalid"),
    ],
)
def test_bad_parties_are_errors(change, problem):
    member = parties()[0]
    with pytest.raises(ValueError, match=problem):
        replace(member, **change)
