"""A hospital's check of its own data, a teacher and an answer; nothing is charged.

All results are exact and private: only the hospital may see them.
"""

import contextlib
import dataclasses
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from fed_dpsd.accounts import card as cards
from fed_dpsd.accounts.account import needed_budget, rounded_budget
from fed_dpsd.accounts.card import how_answered, how_trained
from fed_dpsd.accounts.secret import load_or_create_secret
from fed_dpsd.accounts.words import PrivacyCard, against, other_observers
from fed_dpsd.client import site as sites
from fed_dpsd.client.hospital import Hospital
from fed_dpsd.client.records import HospitalRecords, count_items
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.client.terms import NotAllowed
from fed_dpsd.config import PrivacyConfig
from fed_dpsd.config.errors import quoted
from fed_dpsd.data.datasets import ENOUGH
from fed_dpsd.data.intake import first_few
from fed_dpsd.errors import UserError, format_value, printable
from fed_dpsd.experiment import Experiment, from_overrides
from fed_dpsd.models import torch_threads
from fed_dpsd.models.inference import Images
from fed_dpsd.models.public_networks import digest_of, shapes_in
from fed_dpsd.needs import needs_of, require_room_of_hospital
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.record_sums import RecordSums
from fed_dpsd.progress import table_of
from fed_dpsd.protocol import Refusal, Request

REHEARSED = 16  # images in the rehearsed request
DAY = 86_400.0  # seconds
HELD_OUT = 5  # every fifth image or patient is held out from training


def check(hospital: Hospital, overrides: list[str]) -> Iterator[str | Table]:
    """Read and count the data, train and test a teacher, and rehearse an answer, with reports.

    Args:
        hospital: the hospital, from its own file.
        overrides: all settings of the coordinator's run; [] for one of the file's first choices.

    Raises:
        UserError: the hospital's file does not allow such a run, the run does not fit into this
            machine, the file of public features cannot be read, training diverges, or an answer
            would be refused.
    """
    experiment = _experiment(hospital, overrides)
    if not overrides:
        yield (
            "run: the first choices of the file, with default settings; give the coordinator's "
            "settings to check its run"
        )
    require_room_of_hospital(experiment, count_items(hospital.files))
    content = hospital.read()
    yield _counts(hospital, content)
    yield f"records: {content.count}"
    if content.records.patients is not None:
        yield f"patients: {content.records.num_patients:,}"
    if problem := hospital.problem_of_delta(len(content.ids)):
        raise UserError(problem)
    yield f"units of private training: {_units(hospital)}"
    yield from content.notes
    pixels = content.records.images
    if hospital.weights is not None:
        digest = digest_of("weights", hospital.weights)
        count = len(shapes_in("weights", hospital.weights))
        yield f"weights: tensors: {count:,}; model.digest={digest}"
    if hospital.keys:
        yield f"keys: {len(hospital.keys)}, with digest {hospital.digest_of_keys}"
    yield f"fit: {hospital.fit}; window: {format_value(hospital.files.window)}"
    yield f"pixels: {pixels.min()} to {pixels.max()} of 255, {pixels.mean():.0f} on average"
    yield str(needs_of(experiment, len(content.records)))
    yield f"training: {how_trained(experiment)}"
    yield f"answers: {how_answered(experiment)}"
    planned = experiment.plan
    card = PrivacyCard(cards.privacy_card(experiment, planned), "planned")
    claim = card.epsilon(card.unit, "add_remove")
    yield f"a run: {claim}, against {against(claim.trust, card.content['colluding'])}"
    yield from (f"a run: {sentence}" for sentence in other_observers(card.content))
    if card.unit != "record":
        yield f"the budget counts records: {card.epsilon('record', hospital.budget_relation)}"
    ledger = hospital.ledger
    with ledger.transaction():
        entries = ledger.entries()
    proofs = cards.ledger_epsilons(entries, hospital.delta, "record", "add_remove")
    spent = proofs.get("training", proofs["answers"])  # what a budget counts
    yield f"spent so far: {spent}; the budget is {hospital.budget:g}"
    yield f"when records change during a run: {hospital.when_records_change}"
    if lacking := hospital.open(experiment, "check").exceeded_limit():
        remedy = "before the last answer; agree on fewer rounds or images"
        if lacking == "budget":
            remedy = _more_for_budget(experiment.config.privacy, planned, bool(entries))
        raise UserError(
            f"{lacking}={getattr(hospital, lacking):,.10g} is not enough for this run: this "
            f"site would refuse {remedy}"
        )
    # Teachers of private records lie in this folder, so it must be inside the hospital's own.
    parent = hospital.folder / "checks"
    parent.mkdir(exist_ok=True)
    for left in parent.iterdir():  # by a check that was killed
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > DAY:
                shutil.rmtree(left, ignore_errors=True)
    place = tempfile.TemporaryDirectory(dir=parent)
    with torch_threads(experiment.config.threads_client), place as folder:
        kept, own = hospital.folder / "cache" / "features", Path(folder) / "features"
        _copy_constants(kept, own)
        if experiment.answers.from_teachers:
            yield f"a teacher: {_train(hospital, content, experiment, Path(folder))}"
        outcome = _rehearse(hospital, experiment, Path(folder))
        _copy_constants(own, kept)
        yield f"an answer, rehearsed: {outcome}"


def _copy_constants(source: Path, target: Path) -> None:
    """Copy the constants of fixed features, which are public and slow to compute.

    Rows of images, in the folders below, are private and stay.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.npy"):
        if not (target / file.name).exists():
            shutil.copy(file, target)


def _counts(hospital: Hospital, content: HospitalRecords) -> Table:
    """Tabulate the records of each class, with the local labels of the class."""
    table = table_of("class", "labels", "records")
    counts = np.bincount(content.records.labels, minlength=hospital.num_classes)
    named = hospital.files.labels or {name: name for name in hospital.classes}
    for name, count in zip(hospital.classes, counts, strict=True):
        labels = [label for label, known in named.items() if known == name]
        table.add_row(*map(printable, (name, ", ".join(labels))), f"{count:,}")
    return table


def _units(hospital: Hospital) -> str:
    """Describe the units that private training may protect, and why."""
    allowed, column = hospital.allowed_units, hospital.files.patient_column
    if hospital.units is not None:
        return f"{' or '.join(allowed) or 'none'} (units: in the file)"
    if column is None:
        return "record, because the file names no patient_column"
    return (
        f"patient, because patient_column is {column}; the coordinator sets training.unit=patient "
        "(with method=dp_fedsgd or class_statistics, answers.unit)"
    )


def _more_for_budget(settings: PrivacyConfig, plan: Plan, charged: bool) -> str:
    """Describe what a site refuses if its budget does not cover a plan, with remedies.

    Raising the budget is a remedy only before the first charge (docs/proofs.md, Theorem 7).
    """
    what, fewer = "before the last answer", " or fewer rounds or images"
    if plan.training_stages:  # then answers cost nothing
        what, fewer = "to train" if plan.trainings == 1 else "before the last training", ""
    remedy = f"{what}; agree on more noise (privacy.target_epsilon){fewer}"
    needed = needed_budget(settings, plan)
    if charged or math.isinf(needed):
        return remedy
    return f"{remedy}, or raise budget to at least {rounded_budget(needed, 3)}"


def _experiment(hospital: Hospital, overrides: list[str]) -> Experiment:
    """Return a coordinator's run with these settings, if this hospital allows it.

    Without settings, the run is of the file's first choices.
    """
    request = from_overrides(
        ["federation=deployment", *(overrides or _firsts(hospital))], Path.cwd()
    )
    try:
        return hospital.experiment(request.to_json(), 0)
    except NotAllowed as error:
        if not overrides:
            raise UserError(f"the file: {error}") from None
        raise UserError(
            f"{' '.join(overrides)}: {error}; give all settings of the coordinator's run"
        ) from None


def _firsts(hospital: Hospital) -> list[str]:
    """Return the settings of a run of the file's first choices."""
    names = ",".join(map(quoted, hospital.classes))
    settings = [
        *("data=folder", f"data.classes=[{names}]", "data.num_classes=null"),
        f"num_clients={hospital.num_clients}",
        f"data.shape={list(hospital.shape)}".replace(" ", ""),
        f"data.fit={hospital.fit}",
        f"data.window={format_value(hospital.files.window)}".replace(" ", ""),
        f"method={hospital.methods[0]}",
        f"training={hospital.training[0]}",
        f"answers={hospital.answers[0]}",
        f"model.teacher={hospital.models[0]}",
        f"plugins=[{','.join(hospital.plugins)}]",
    ]
    column = hospital.files.patient_column
    if column is not None and hospital.allowed_units[:1] == ("patient",):
        settings.append(f"data.patient_column={quoted(column)}")
    return settings


def _train(
    hospital: Hospital, content: HospitalRecords, experiment: Experiment, folder: Path
) -> str:
    """Train teachers; describe their joint accuracy on images (or patients) held out from them."""
    config = dataclasses.replace(experiment.config, cache=str(folder))
    ids = content.ids if content.records.patients is None else content.records.patients
    distinct, place = np.unique(ids, return_inverse=True)
    if len(distinct) == 1:
        return "one image or patient is too few for a hold-out"
    held_out = place % HELD_OUT == 0
    seen, unseen = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    secret = SecretStreams(load_or_create_secret(folder / "rehearsal"))
    records = content.records.take(seen)
    teachers = Teachers(config, experiment.training, hospital.client, records, ids[seen], secret)
    tested = content.records.take(unseen)
    predicted = teachers.sensitive_probabilities(Images(tested.images))
    if teachers.watch.diverged:
        raise teachers.watch.diverged[0]
    probabilities = np.nanmean(predicted, axis=0)
    right = probabilities.argmax(1) == tested.labels
    return _accuracy(right, len(set(place[unseen])), content.records.labels, hospital.classes)


def _accuracy(
    right: NDArray[np.bool_], units: int, labels: NDArray[np.int64], names: Sequence[str]
) -> str:
    """Describe an accuracy on held-out records, or why it cannot be judged.

    An accuracy p on n independent images has a standard error of sqrt(p (1 - p) / n), at most 10
    points if n is ENOUGH. With fewer, the text has the counts alone. Records of one patient are not
    independent, so they count once.

    Args:
        right: (N,), whether each held-out record is predicted correctly.
        units: the number of held-out images or patients.
        labels: the labels of all records.
        names: the names of the classes.
    """
    there = set(labels.tolist())
    if len(there) == 1:
        return f"all records are of class {printable(names[there.pop()])}: nothing to tell apart"
    text = f"{100 * right.mean():.1f} % on {len(right):,} held-out records"
    if units < ENOUGH:
        text = (
            f"right on {right.sum():,} of {len(right):,} held-out records, too few to judge it: "
            f"that takes {ENOUGH} held-out images or patients, about {ENOUGH * HELD_OUT} in all"
        )
    lacking = first_few([name for number, name in enumerate(names) if number not in there])
    return text + (f"; no record is of class {lacking}" if lacking else "")


def _rehearse(hospital: Hospital, experiment: Experiment, folder: Path) -> str:
    """Answer a request, charged to a temporary ledger; describe the outcome."""
    secret = hospital.folder / "secret"
    load_or_create_secret(secret)  # draws the secret if there is none yet
    (folder / "secret").symlink_to(secret.absolute())
    rehearsed = dataclasses.replace(hospital, state=str(folder))
    config = dataclasses.replace(experiment.config, cache=str(folder))
    experiment = dataclasses.replace(experiment, config=config)
    site = rehearsed.open(experiment, "rehearsal")
    if isinstance(experiment.answers, RecordSums):
        request, asked = _sum_request(experiment, experiment.answers), "a sum over records"
    else:
        request, asked = _image_request(hospital), f"{REHEARSED} images"
    request = dataclasses.replace(request, acknowledged={experiment.answers.name: 10 * REHEARSED})
    response = sites.answer(experiment.method, request, site)
    if isinstance(response, Refusal):
        raise UserError(f"a request for {asked} would be refused: {response.reason}")
    return f"{asked}, {response.nbytes:,} bytes"


def _image_request(hospital: Hospital) -> Request:
    """Return a request with random images."""
    rng = np.random.Generator(np.random.PCG64(0))
    images = rng.integers(0, 256, (REHEARSED, *hospital.shape), np.uint8)
    uniform = np.full((REHEARSED, hospital.num_classes), 1 / hospital.num_classes, np.float32)
    return Request(1, images, uniform)


def _sum_request(experiment: Experiment, answers: RecordSums) -> Request:
    """Return a request for a sum over records, with numbers of zero."""
    context = experiment.public
    size = answers.size_of_request(context.make_teacher(0).classifier)
    return context.request(answers.kind, 1, np.zeros(size, np.float32))
