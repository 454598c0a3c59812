"""DPSD: one site, and its claims if the teacher is the discriminator."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fed_dpsd.accounts import card as cards
from fed_dpsd.client import site as sites
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ProtocolError
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder
from tests.ledgers import entries_of
from tests.running import finish

DPSD = ("method=dpsd", "num_clients=1")
AGAINST_TEACHER = (*DPSD, "method.discriminator=teacher", "method.generator_steps=2")


@pytest.mark.slow
def test_it_is_feddpsd_with_one_client_bit_by_bit(small, tmp_path):
    """Without noise, since an answer's noise also depends on the method's name."""
    _, alone = finish(small(*DPSD, "training=plain", "answers=probabilities"), tmp_path / "dpsd")
    _, federated = finish(
        small("num_clients=1", "training=plain", "answers=probabilities"), tmp_path / "fed_dpsd"
    )
    one, other = alone[-1].student.state_dict(), federated[-1].student.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("answers", ["label", "gradient", "probabilities"])
def test_a_teacher_as_discriminator_proves_nothing(small, tmp_path, answers):
    """The control: with the student as discriminator the same noise has a finite epsilon."""
    experiment = small(*AGAINST_TEACHER, "training=plain", f"answers={answers}")
    folder = new_run_folder(experiment)
    summary = runs.run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)
    for row in summary["privacy"]["proven"]:
        assert (row["epsilon"], row["spent"], row["queries"]) == ("inf", "inf", 3 * 64 + 1)
    assert summary["queries"]["answered_per_client"] == 3 * 64 + 1
    if answers != "probabilities":
        assert "teachers' own weights" in summary["privacy"]["reason"]
        safe = small(*DPSD, "training=plain", f"answers={answers}")
        found = cards.proven_epsilons(safe, safe.plan, "record", "replace_one")
        assert math.isfinite(found["answers"].value)


def test_the_weights_of_a_private_teacher_are_paid_for(small, tmp_path):
    experiment = small(
        *AGAINST_TEACHER, "training=dp_sgd", "answers=probabilities", "training.steps=3"
    )
    folder = new_run_folder(experiment)
    summary = runs.run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)
    row = summary["privacy"]["proven"][0]
    assert row["epsilon"] == row["spent"] < math.inf


def test_its_generators_are_trained_against_the_very_teacher(small, tmp_path):
    experiment = small(*AGAINST_TEACHER)
    federation, _ = finish(experiment, tmp_path)
    discriminator = experiment.method.fetch_discriminator(federation, experiment.public)
    (teacher,) = federation._sites[0]._teachers.models
    given, true = discriminator.state_dict(), teacher.state_dict()
    assert all(torch.equal(given[name], true[name]) for name in true)
    entries = entries_of(federation._sites[0].ledger)
    assert [entry.queries for entry in entries] == [1, 64, 64, 64]  # requested twice, charged once


@pytest.mark.parametrize("settings", [DPSD, AGAINST_TEACHER], ids=["student", "teacher"])
def test_what_generators_learn_from_the_teacher_counts_as_answers(small, tmp_path, settings):
    for kind in ("kept", "new"):
        kept = f"method.generators={kind}", "method.images_per_generator=48"
        experiment = small(*settings, "method.generator_steps=3", *kept)
        _, finished = finish(experiment, tmp_path / kind)
        generated = experiment.method.mixture(64)["generated"]
        trained = 3 * (48 if kind == "kept" else generated) if settings is AGAINST_TEACHER else 0
        assert 0 < generated < 48
        counted = [(each.forward_answers, each.backward_answers) for each in finished]
        assert counted == [(64 + trained, trained)] * 3


def test_weights_are_refused_where_the_clients_own_method_does_not_ship_them(small, tmp_path):
    request = Request.without_images("weights", (1, 8, 8), 10)
    for settings in (DPSD, ("num_clients=1",)):
        experiment = small(*settings, "training=plain", "answers=probabilities")
        federation = LocalFederation(experiment, tmp_path / settings[0])
        for refused in federation.each(request).values():
            assert isinstance(refused, Refusal)
            assert refused.reason.endswith("cost the client 1 releases of weights")
        granted = replace(request, acknowledged={"weights": 1})
        with pytest.raises(ProtocolError, match="does not answer 'weights'"):
            sites.answer(experiment.method, granted, federation._sites[0])
        assert not entries_of(federation._sites[0].ledger)
    response = LocalFederation(small(*AGAINST_TEACHER), tmp_path / "teacher").each(request)[0]
    assert isinstance(response, Response)
    assert response.values.dtype == np.float32
