"""Random streams: repeatable and independent."""

import numpy as np

from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.streams import Streams


def test_equal_keys_give_equal_draws_and_any_other_key_another():
    base = {"purpose": "noise", "client": 1, "query_id": 2}
    first = Streams(0).numpy(**base).random(4)
    assert (Streams(0).numpy(**base).random(4) == first).all()
    others = [
        Streams(1).numpy(**base),
        Streams(0).numpy(**base | {"purpose": "latents"}),
        Streams(0).numpy(**base | {"client": 2}),
        Streams(0).numpy(**base | {"query_id": 2**200}),
    ]
    assert not any(np.isin(other.random(4), first).any() for other in others)


def test_secret_noise_alone_depends_on_what_it_hides():
    key = {"purpose": "answers", "client": 1, "query_id": 2, "hides": "ab"}
    for streams, seeded in ((Streams(0), True), (SecretStreams(bytes(32)), False)):
        first = streams.noise(**key).random(4)
        assert (streams.noise(**key).random(4) == first).all()
        hides_another = streams.noise(**key | {"hides": "cd"}).random(4)
        assert np.isin(hides_another, first).any() == seeded
        for other in ({"purpose": "weights"}, {"client": 2}, {"query_id": 3}):
            assert not np.isin(streams.noise(**key | other).random(4), first).any()


def test_torch_streams_are_keyed_too():
    import torch

    first = torch.rand(4, generator=Streams(0).torch("a"))
    assert torch.equal(first, torch.rand(4, generator=Streams(0).torch("a")))
    assert not torch.equal(first, torch.rand(4, generator=Streams(0).torch("b")))
