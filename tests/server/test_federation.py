"""Summing answers, and handling bad ones."""

import itertools
import math
import re
import shutil
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fed_dpsd.client import learning
from fed_dpsd.client.site import answer
from fed_dpsd.engines.clients import shared_ledger
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.models import inference
from fed_dpsd.models.scattering import Scattering
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.server.run_folder import new_run_folder
from tests.every import every
from tests.ledgers import entries_of


def request(count=16):
    rng = np.random.Generator(np.random.PCG64(0))
    images = rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    return Request(1, images, rng.dirichlet(np.ones(10), count).astype(np.float32))


def test_the_sum_counts_every_teacher(small, tmp_path):
    for teachers in (1, 4):
        experiment = small(f"teachers_per_client={teachers}", "training=plain", "answers=label")
        total = LocalFederation(experiment, tmp_path / str(teachers)).total(request())
        assert total.count == 2 * teachers
        assert (total.sum.sum(1) == 2 * teachers).all()


@every(("networks", "shared"), [("[scattering]", True), ("[scattering,patches]", False)])
def test_clients_share_batches_of_fixed_features_and_keep_their_answers(
    small, tmp_path, monkeypatch, networks, shared
):
    """A client alone, the control, fills its last batch with zeros, and answers the same."""
    settings = "num_clients=20", "partition=iid", "training=dp_sgd", "training.steps=2"
    experiment = small(*settings, f"model.teachers={networks}")
    shutil.rmtree(Path(experiment.config.cache) / "teachers", ignore_errors=True)
    federation, computed = LocalFederation(experiment, tmp_path / "together" / networks), Counter()
    forward = Scattering.forward

    def counted(self, images):
        computed[len(images)] += 1
        return forward(self, images)

    monkeypatch.setattr(Scattering, "forward", counted)
    monkeypatch.setattr(inference, "_rows", OrderedDict())
    monkeypatch.setattr(learning, "safe_batch", lambda *_: inference.IMAGES_AT_ONCE)
    together = federation.each(request())
    records = sum(site.num_records for site in federation._sites.values())
    # With patches, too, ten clients have a batch each. Every teacher is checked on two images.
    expected = {128: math.ceil(records / 128), 16: 1, 2: 20} if shared else {128: 10, 16: 1, 2: 10}
    assert computed == expected
    assert not list(federation._unread(range(20)))  # the teachers are trained
    inference._rows.clear()
    shutil.rmtree(Path(experiment.config.cache) / "teachers")
    alone = LocalFederation(experiment, tmp_path / "alone" / networks)
    own = answer(experiment.method, request(), alone._sites[8])
    assert (own.values == together[8].values).all()
    assert computed[16] == 2


def test_a_total_is_the_sum_of_each(small, tmp_path):
    federation = LocalFederation(
        small("num_clients=3", "training=plain", "answers=gradient"), tmp_path
    )
    answers, total = federation.each(request()), federation.total(request())
    assert list(answers) == [0, 1, 2]
    assert (total.sum == sum(response.values for response in answers.values())).all()
    assert (total.count, total.refused) == (3, {})


def test_a_client_that_refuses_counts_no_teacher(small, tmp_path):
    experiment = small("training=plain", "answers=label", "teachers_per_client=3")
    refusing = Lying(experiment, tmp_path, lambda answer: Refusal(answer.query_id, "no"))
    total = refusing.total(request())
    assert (total.count, total.refused) == (3, {1: "no"})
    assert (total.sum.sum(1) == 3).all()


# --- bad answers ---


class Lying(LocalFederation):
    """The second client's answers are what `lie` makes of them."""

    def __init__(self, experiment, folder, lie):
        super().__init__(experiment, folder)
        self.lie = lie

    def _deliver(self, request):
        answers = super()._deliver(request)
        return answers | {1: self.lie(answers[1])}


def test_a_bad_answer_counts_as_zero_and_the_others_as_before(small, tmp_path, caplog, subtests):
    """The number of teachers is unchanged, and the problem is only in the operator's log."""
    for number, (lie, said) in enumerate(
        [
            (lambda a: replace(a, query_id=9), "query_id=9 instead of 1"),
            (lambda a: replace(a, values=a.values[:3]), r"shape \(3, 10\)"),
            (lambda a: replace(a, values=a.values.astype(np.int64)), "type int64"),
            (lambda a: replace(a, values=np.full((16, 10), np.nan)), "16 of 16 rows"),
            (lambda a: replace(a, values=a.values * np.float64(1e12)), "16 of 16 rows"),
        ]
    ):
        with subtests.test(lie=lie, said=said):
            caplog.clear()
            folder = tmp_path / f"{number}"
            folder.mkdir()
            experiment = small("training=plain", "answers=gradient", "answers.noise_at=server")
            honest = LocalFederation(experiment, folder / "a").each(request())
            lying = Lying(experiment, folder / "b", lie)
            each, total = lying.each(request()), lying.total(request())
            assert (each[0].values == honest[0].values).all()
            assert (each[1].values == 0).all()
            assert (total.count, total.refused) == (2, {})
            assert re.search(f"client 1: .*{said}", caplog.text)


def test_one_bad_row_costs_that_row_alone(small, tmp_path):
    def lie(response):
        values = response.values.astype(float)
        values[3, 0] = np.inf
        return replace(response, values=values)

    experiment = small("training=plain", "answers=gradient")
    honest = LocalFederation(experiment, tmp_path / "a").each(request())[1].values
    received = Lying(experiment, tmp_path / "b", lie).each(request())[1].values
    assert (received[3] == 0).all()
    kept = np.arange(16) != 3
    assert (received[kept] == honest[kept]).all()


def test_bad_class_counts_count_as_zero(small, tmp_path, caplog, subtests):
    for number, (lie, said) in enumerate(
        [
            (lambda a: replace(a, values=a.values * np.nan), "NaN or infinity"),
            (lambda a: replace(a, values=a.values + np.inf), "NaN or infinity"),
            (lambda a: replace(a, values=a.values[:, :9]), r"shape \(1, 9\) instead of \(1, 10\)"),
            (lambda a: replace(a, values=a.values.astype(complex)), "type complex128"),
            (lambda a: replace(a, query_id=3), "query_id=3 instead of 0"),
        ]
    ):
        with subtests.test(lie=lie, said=said):
            caplog.clear()
            folder = tmp_path / f"{number}"
            folder.mkdir()
            experiment = small(
                "training=dp_sgd", "answers=probabilities", "training.steps=1", "model=scattering"
            )
            counts = Request.without_images("counts", (1, 8, 8), 10)
            honest = LocalFederation(experiment, folder / "a").each(counts)
            received = Lying(experiment, folder / "b", lie).each(counts)
            assert (received[0].values == honest[0].values).all()
            assert received[1].values.tolist() == [[0.0] * 10]
            assert re.search(f"client 1: its class counts count as zero: .*{said}", caplog.text)
            assert not (honest[1].values == 0).any()


@pytest.mark.slow
def test_values_of_another_shape_or_type_count_as_zero(small, tmp_path, caplog, subtests):
    cases = itertools.count()
    for answers in ["answers=label", "answers=gradient answers.k=5"]:
        for change in [
            lambda values: values[:-1],
            lambda values: np.concatenate([values, values[:1]]),
            lambda values: values[..., None],
            lambda values: values.reshape(-1),
            lambda values: values[:0],
            lambda values: values.astype(np.uint32),
            lambda values: values.astype(np.int32),
            lambda values: values.astype(">f8"),
            lambda values: values.astype(complex),
            lambda values: values.astype(str),
        ]:
            with subtests.test(change=change, answers=answers):
                caplog.clear()
                folder = tmp_path / f"{next(cases)}"
                folder.mkdir()
                experiment = small("training=plain", *answers.split())
                lying = Lying(
                    experiment, folder, lambda a, change=change: replace(a, values=change(a.values))
                )
                given = lying.each(request())
                assert given[0].values.any()
                assert given[1].values.shape == (16, 10)
                assert not given[1].values.any()
                assert "client 1: the answer counts as zero: values of " in caplog.text


@every(
    ("answers", "integer"),
    [
        ("answers=gradient", np.uint16(256)),  # its square is 0 in 16 bits
        ("answers=gradient", np.uint8(16)),
        ("answers=votes teachers_per_client=300", np.uint8(255)),
    ],
)
def test_integers_do_not_wrap_around_the_bounds_of_an_answer(small, tmp_path, answers, integer):
    """The votes of 300 teachers may be 255; a uint8 must not end the run."""
    experiment = small("training=plain", "answers.noise_multiplier=1", *answers.split())
    federation, query = LocalFederation(experiment, tmp_path), request()
    response = Response(query.query_id, np.full(query.predictions.shape, integer))
    received = federation._receive(query, 1, response)
    assert received.values.any() == ("votes" in answers)


def test_a_liar_about_its_teachers_weighs_no_more(small, tmp_path):
    experiment = small("training=plain", "answers=label")
    lying = Lying(experiment, tmp_path, lambda response: replace(response, teachers=1_000))
    assert lying.total(request()).count == 2


def test_the_servers_noise_is_another_one_for_other_answers(small, tmp_path):
    """Otherwise two sums of one request would differ by exactly one client's answer.

    The control is seeded noise, which guarantees nothing.
    """
    for noise in ("secure", "seeded"):
        each = [small(*SERVER_NOISE, f"noise={noise}", f"out={tmp_path}/{name}") for name in "ab"]
        honest = LocalFederation(each[0], new_run_folder(each[0]))
        lying = Lying(each[1], new_run_folder(each[1]), silent)
        lying._noise = honest._noise
        exact = honest.each(request())[1].values
        gap = honest.total(request()).sum - lying.total(request()).sum
        assert (np.abs(gap).mean() > 10 * np.abs(exact).mean()) == (noise == "secure")


SERVER_NOISE = ("training=plain", "answers=gradient", "answers.noise_at=server", "noise=secure")


def silent(response):
    return replace(response, values=0 * response.values)


def test_copies_of_a_run_folder_release_one_sum_with_the_servers_noise(small, tmp_path):
    """Otherwise, other clients' answers to a request would be a second release for one charge."""
    experiment = small(*SERVER_NOISE, f"run_folder={tmp_path}/run")
    folder = new_run_folder(experiment)
    shutil.copytree(folder, tmp_path / "copy")
    released = LocalFederation(experiment, folder).total(request()).sum
    again = Lying(experiment, tmp_path / "copy", silent).total(request()).sum
    assert again.tolist() == released.tolist()


def test_requests_do_not_share_the_servers_noise(small, tmp_path):
    """Not even for equal answers: with silent clients, a sum is the noise itself."""
    experiment = small(*SERVER_NOISE, f"run_folder={tmp_path}/run")
    federation = Lying(experiment, new_run_folder(experiment), silent)
    one, two = (federation.total(replace(request(), query_id=number)).sum for number in (1, 2))
    assert not np.isin(one, two).any()


def test_two_runs_of_one_name_are_charged_apart(small, tmp_path):
    """Sums over other answers have other noise, so each run releases its clients' answers."""
    ledger, released = tmp_path / "ledger", []
    for parent, lie in (("a", lambda response: response), ("b", silent)):
        experiment = small(*SERVER_NOISE, f"ledger={ledger}", f"run_folder={tmp_path}/{parent}/r")
        folder = new_run_folder(experiment)
        released.append(Lying(experiment, folder, lie).total(request()).sum)
    assert (released[0] != released[1]).any()
    entries = entries_of(shared_ledger(experiment, 0))
    assert len({entry.run for entry in entries}) == len(entries) == 2
