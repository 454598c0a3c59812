"""Whole audits of every way to answer: correct code passes, and almost no noise is refuted.

Correct code fails an audit with probability at most 0.001; seeds are fixed.
"""

import dataclasses
import itertools
import typing

import pytest
import yaml
from dp_accounting import NonPrivateDpEvent
from hydra.utils import get_class

from fed_dpsd.audits import attacks, black_box, conformance, draws
from fed_dpsd.audits.conformance import audit_client
from fed_dpsd.errors import UserError
from fed_dpsd.storage import conf_folder

ANSWERS = sorted((conf_folder() / "answers").glob("*.yaml"))
NEEDS = {
    "gradient_sum": ("method=dpdfd", "num_clients=1"),
    "clipped_gradients": ("method=dp_fedsgd", "model=scattering", "diagnostics=false"),
    "class_statistics": (
        *("method=class_statistics", "model=scattering", "diagnostics=false", "rounds=1"),
    ),
    "noisy_max": ("teachers_per_client=3",),
    "noisy_max_gaussian": ("teachers_per_client=3",),
}
AT = {"distributed": ("answers.quorum={threshold: 3, colluding: 1}", "num_clients=4")}
REFUSED = [  # by the mechanism itself
    ("clipped_gradients", "noise_at=server"),
    ("class_statistics", "noise_at=server"),
    ("gradient_sum", "noise_at=distributed"),  # with its method's one client
    ("votes", "noise_law=laplace", "noise_at=distributed"),
]
VARIANTS = [
    ("answers=gradient", "answers.k=3"),
    ("answers=gradient", "answers.k=3", "answers.mask=private"),
    ("answers=gradient", "answers.k=2", "answers.mask=signed", "answers.scaling=clip"),
    ("answers=label", "answers.k=3", "teachers_per_client=3"),
    ("answers=label", "answers.threshold=0.1"),
    ("answers=label", "answers.lies=classes"),
    ("answers=noisy_max", "answers.noise_law=gumbel"),
]
REQUESTS_ALONE = [  # a request is one release, so an audit sends many
    ("answers=gradient", "answers.normalise=batch"),
    (*NEEDS["gradient_sum"], "answers=gradient_sum", "answers.normalise=batch"),
]


def cases(path):
    """All noise laws and places of the noise that the class of conf/answers has."""
    loader = get_class(whole(path)["_target_"])
    hints = typing.get_type_hints(loader)
    fields = {field.name for field in dataclasses.fields(loader)} & {"noise_law", "noise_at"}
    names = sorted(fields, reverse=True)
    for chosen in itertools.product(*(typing.get_args(hints[name]) for name in names)):
        settings = tuple(f"{n}={value}" for n, value in zip(names, chosen, strict=True))
        if (path.stem, *settings) not in REFUSED:
            more = AT.get(dict(zip(names, chosen, strict=True)).get("noise_at"), ())
            overrides = (f"answers.{setting}" for setting in settings)
            yield (*NEEDS.get(path.stem, ()), f"answers={path.stem}", *overrides, *more)


def whole(path):
    """The keys of a file of conf/answers, with those of its defaults."""
    keys = yaml.safe_load(path.read_text())
    for name in keys.get("defaults", ["_self_"]):
        if name != "_self_":
            keys = whole(path.with_stem(name)) | keys
    return keys


ALL = [case for path in ANSWERS for case in cases(path)] + VARIANTS
SUMS = "gradient", "class_statistics"
PRIVATE = [c for c in ALL if not any(name in setting for setting in c for name in SUMS)]
PRIVATE += [("answers=gradient",), ("answers=gradient", "answers.noise_at=server")]


# Fast; the others are slow.
EVERY_DAY = [
    {"answers=probabilities"},
    {"answers=label", "answers.threshold=0.1"},
    {"answers=label", "answers.k=3"},
    {"answers=gradient", "answers.noise_at=server"},
    {"answers=gradient", "answers.mask=private"},
    {"answers=votes", "answers.noise_law=laplace", "answers.noise_at=client"},
]
# With those, each mechanism, law and place of noise is in every run of .ci/run.
EVERY_PUSH = [
    {"answers=label", "answers.noise_at=distributed"},
    {"answers=noisy_max", "answers.noise_law=laplace"},
    {"answers=noisy_max_gaussian", "answers.noise_law=gaussian"},
]


def marked(settings):
    """Mark the rare ways to answer slow; requests alone take seconds."""
    alone = settings in REQUESTS_ALONE or "answers=gradient_sum" in settings
    sums = {"answers=clipped_gradients", "answers=class_statistics"} & set(settings)
    marks = []
    if alone or not any(each <= set(settings) for each in EVERY_DAY):
        marks.append(pytest.mark.slow(seconds=20 if sums else 5 if alone else 2))
    if any(each <= set(settings) for each in EVERY_PUSH):
        marks.append(pytest.mark.ci)
    return pytest.param(settings, id=" ".join(settings), marks=marks)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Few runs, enough to refute almost no noise: 250 of 250 against 0 of 250 is epsilon 3.2."""
    for name, runs in {"CLOSE_RUNS": 1_000, "ALONE_RUNS": 250, "CLAIM_RUNS": 5}.items():
        monkeypatch.setattr(attacks, name, runs)
    monkeypatch.setattr(black_box, "PILOT", (20, 250))
    monkeypatch.setattr(draws, "NUMBERS", 2**12)
    monkeypatch.setattr(draws, "LABELS", 2**10)
    monkeypatch.setattr(draws, "STEPPED", 2**12)


def audited(experiment, broken=None):
    found = audit_client(experiment, broken, lambda text: None)
    assert found.as_expected, [str(each) for each in found.checks if each.contradicts] + [
        sentence for attack in found.attacks for sentence in attack.verdict()
    ]
    return found


@pytest.mark.parametrize("settings", [marked(each) for each in [*ALL, *REQUESTS_ALONE]])
def test_every_way_to_answer_passes_its_audit_and_almost_no_noise_is_refuted(small, settings):
    experiment = small("training=plain", "rounds=2", "queries_per_round=8", *settings)
    if isinstance(experiment.answers.event("record", "add_remove"), NonPrivateDpEvent):
        with pytest.raises(UserError, match="nothing to audit: nothing is proven of the answers"):
            audit_client(experiment, None, lambda text: None)
        return
    found = audited(experiment)
    assert found.attacks
    assert len(found.checks) >= 2
    audited(experiment, "none")


def test_every_choice_of_conf_answers_is_audited_or_proves_nothing():
    named = {setting for case in ALL for setting in case if setting.startswith("answers=")}
    assert named == {f"answers={path.stem}" for path in ANSWERS}


@pytest.mark.parametrize("refused", REFUSED, ids=" ".join)
def test_what_no_audit_covers_cannot_be_run(small, refused):
    name, *settings = refused
    overrides = [f"answers.{setting}" for setting in settings]
    with pytest.raises(UserError):
        small("training=plain", *NEEDS.get(name, ()), f"answers={name}", *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("settings", PRIVATE, ids=" ".join)
def test_answers_of_private_teachers_pass_their_audit(small, settings, monkeypatch):
    """Their noise is small. The attacks on training do not depend on answers."""
    monkeypatch.setattr(conformance, "training_attacks", lambda *arguments: ())
    monkeypatch.setattr(attacks, "SAMPLED_STEPS", 40)
    private = ("training=dp_sgd", "training.steps=3", "rounds=2", "queries_per_round=8")
    audited(small(*private, *settings))
