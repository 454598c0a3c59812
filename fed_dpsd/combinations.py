"""Combinations of choices: what does not go together, and what to use in its place."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from fed_dpsd.config import BUNDLED, Config
from fed_dpsd.data.partition import ByClass, Partition
from fed_dpsd.errors import UserError, shown
from fed_dpsd.methods.central import Central
from fed_dpsd.methods.direct import Direct
from fed_dpsd.methods.method import Method, Plan
from fed_dpsd.models.classifiers import CLASSIFIERS, NO_DP_SGD
from fed_dpsd.models.efficientnet import require_weights
from fed_dpsd.models.torchvision_networks import GROUP_FORMS
from fed_dpsd.papers.gradient_sum import GradientSum
from fed_dpsd.papers.output_gradient import OutputGradient
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.label_dp import LabelPrivate
from fed_dpsd.privacy.mechanism import Mechanism, Probabilities, quorum_of
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import CustomTraining, Training, TrainingMechanism
from fed_dpsd.privacy.votes import NoisyVotes

NOISELESS = {"noise_multiplier": 0.0, "epsilon_per_answer": math.inf}
# Squared ratio of signal to noise, over a whole run, up to which students are near chance: those of
# MNIST are at chance at 128 (docs/results/mnist.md; 75.7 % at 64,000), and those of digits reach 23
# to 34 % at 198 (training=plain answers=noisy_max, seeds 0 to 2).
NEAR_CHANCE = 256


def misfits(
    config: Config,
    method: Method | None,
    training: Training | None,
    answers: Mechanism | None,
    partition: Partition | None,
) -> list[str]:
    """Return a sentence on each pair of choices that do not go together.

    A choice is None where it has problems of its own.
    """
    baseline = getattr(method, "baseline", None)
    problems = _unknown_architectures(config) + _patients(config, training) + _bundled(config)
    for trained in (training, baseline):
        problems += _private_training(config, trained)
    if baseline and config.teacher.path is not None:
        problems.append(
            f"teacher.path={config.teacher.path}: the baseline of method={name_of(method)} is "
            "trained here, by its own training; use teacher.path=null"
        )
    if isinstance(baseline, TrainingMechanism) and baseline.unit != "record":
        problems.append(
            f"method.baseline.unit={baseline.unit}: a baseline is trained by records only; use "
            "method.baseline.unit=record"
        )
    classes = config.data.num_classes
    if isinstance(partition, ByClass) and partition.classes_per_client > classes:
        problems.append(
            f"partition.classes_per_client={partition.classes_per_client} is more than the "
            f"{classes} classes of data={config.data.name}; use {classes} or fewer"
        )
    own = isinstance(training, CustomTraining | LabelPrivate | TrainingMechanism)
    if training and own and config.teacher.path is not None:
        problems.append(
            f"teacher.path={config.teacher.path}: training={training.name} trains its teachers "
            "itself; use teacher.path=null"
        )
    if isinstance(training, OutputGradient) and not config.federation.simulation:
        problems.append(
            "training=output_gradient: nothing is proven of it, so it runs in a simulation "
            "only; use training=dp_sgd, or federation=simulation"
        )
    if method:
        problems += _method(config, method, training, answers)
    if answers:
        problems += _answers(config, answers, training)
    if isinstance(training, LabelPrivate):
        problems += _label_private(config, method, training, partition)
    return problems


def name_of(method: Method) -> str:
    """Return the name of the method's file."""
    return type(method).__module__.rpartition(".")[2]


def _architectures(config: Config) -> set[str]:
    """Return the names of the teachers' architectures."""
    return set(map(config.architecture, range(config.num_clients)))


def _teachers_keys(config: Config) -> dict[str, str]:
    """Return the architectures of teachers that are trained, by the keys that name them."""
    if not config.model.teachers:
        return {"model.teacher": config.model.teacher}
    return {f"model.teachers[{i}]": name for i, name in enumerate(config.model.teachers)}


def _unknown_architectures(config: Config) -> list[str]:
    """Return the architectures that are unknown, or lack their public weights."""
    model, known = config.model, ", ".join(CLASSIFIERS)
    named = _teachers_keys(config) | {
        "model.teacher": model.teacher,
        "model.student": model.student,
    }
    if config.teacher.arch is not None:
        named["teacher.arch"] = config.teacher.arch
    problems = [
        f"{key}={name} is unknown; choose one of: {known}"
        for key, name in named.items()
        if name not in CLASSIFIERS
    ]
    here = {model.student} | (_architectures(config) if config.federation.simulation else set())
    if "pretrained" in here:
        try:
            require_weights()
        except UserError as error:
            problems.append(str(error))
    return problems


def _private_training(config: Config, training: Training | None) -> list[str]:
    """Return what a private training of teachers, or of a baseline, cannot train."""
    if not isinstance(training, TrainingMechanism):
        return []
    fitting = ", ".join(name for name in CLASSIFIERS if name not in NO_DP_SGD)
    return [
        f"{key}={name}: training={training.name} bounds each record's part, which it cannot in "
        f"this network, whose layers mix records; use {GROUP_FORMS.get(name, 'cnn')}, or another "
        f"of: {fitting}"
        for key, name in list(_teachers_keys(config).items())[: config.num_clients]
        if name in NO_DP_SGD
    ]


def _method(
    config: Config, method: Method, training: Training | None, answers: Mechanism | None
) -> list[str]:
    """Return what a method needs and does not have."""
    problems, name = [], name_of(method)
    if isinstance(method, Direct) and {config.model.student} != _architectures(config):
        problems.append(
            f"model.teacher={config.model.teacher}: method={name} trains the student's own "
            f"network; use model.teacher={config.model.student} model.teachers=[]"
        )
    if method.num_clients not in (None, config.num_clients):
        problems.append(
            f"num_clients={config.num_clients}: method={name} has one client; use num_clients=1"
        )
    if training and training.name not in (method.trainings or (training.name,)):
        problems.append(
            f"training={training.name}: method={name} needs another; use "
            f"training={' or '.join(method.trainings or ())}"
        )
    if getattr(method, "baseline", None) and not config.federation.simulation:
        problems.append(
            f"method={name} trains a classifier of all records by a message's settings, which "
            "only a simulation does; use method=fed_dpsd"
        )
    if getattr(method, "pooling", "mean") == "odds":
        counted = training.counts_classes if isinstance(training, TrainingMechanism) else True
        counts = counted and getattr(method, "class_counts", False)
        if not (counts and isinstance(answers, Probabilities)):
            problems.append(
                "method.pooling=odds needs answers=probabilities, method.class_counts=true "
                "and, with training=dp_sgd, training.count_fraction; use method.pooling=mean"
            )
    if isinstance(answers, GradientSum) and getattr(method, "mean_over", None) != "batch":
        problems.append(
            "answers=gradient_sum is one gradient for all images of a round; use method=dpdfd, "
            "or another with method.mean_over=batch"
        )
    if config.clients_per_round is not None and not method.asks_cohorts:
        problems.append(
            f"clients_per_round={config.clients_per_round}: method={name} asks all its clients; "
            "use clients_per_round=null"
        )
    if config.pictures and not method.asks_pictures:
        problems.append(
            f'pictures={config.pictures}: method={name} asks no pictures; use pictures=""'
        )
    if method.averages and config.teacher.path is None:
        if len(_architectures(config)) > 1:
            problems.append(
                f"model.teachers={shown(config.model.teachers)}: method={name} averages weights "
                "of one architecture; use model.teachers=[]"
            )
        if not config.teacher.same_start:
            problems.append(
                f"teacher.same_start=false: method={name} averages weights, "
                "which is noise where they start apart; use teacher.same_start=true"
            )
    return problems


def _answers(config: Config, answers: Mechanism, training: Training | None) -> list[str]:
    """Return what answers without noise, or in secure sums, need and do not have."""
    problems, field = [], answers.calibrated_by
    silent = field in NOISELESS and getattr(answers, field) == NOISELESS[field]
    if silent and not isinstance(training, TrainingMechanism):
        problems.append(
            f"answers.{field}={getattr(answers, str(field)):g}: teachers that are trained without "
            "noise need noise in their answers; use training=dp_sgd, or answers=probabilities, "
            "whose epsilon is inf"
        )
    if quorum := quorum_of(answers):
        try:
            quorum.check(config.num_clients)
        except ValueError as error:
            problems.append(f"answers.quorum.{error}")
        if config.clients_per_round is not None:
            problems.append(
                f"clients_per_round={config.clients_per_round}: a secure sum is over all clients; "
                "use clients_per_round=null, or answers.noise_at=client"
            )
    return problems


def _bundled(config: Config) -> list[str]:
    """Refuse what the digits that come with scikit-learn cannot be told in a simulation.

    Hospitals have records of their own under that name, in a rehearsal.
    """
    data = config.data
    if data.name != BUNDLED or not config.federation.simulation:
        return []
    if data.path is not None:
        return [
            f"data.path={data.path}: data={BUNDLED} comes with scikit-learn, and reads no file; "
            f"use data=imagefolder data.path={data.path} for pictures of your own"
        ]
    fixed = {"num_classes": 10, "shape": (1, 8, 8), "hub": None, "patient_column": None}
    return [
        f"data.{key}={shown(getattr(data, key))}: data={BUNDLED} has {shown(value)}; leave it out, "
        "or choose other data"
        for key, value in fixed.items()
        if getattr(data, key) != value
    ]


def _patients(config: Config, training: Training | None) -> list[str]:
    """Return what keeps a training from knowing its patients; hospitals check their own files."""
    data, simulation = config.data, config.federation.simulation
    if data.records_per_patient is not None and not simulation:
        return [
            f"data.records_per_patient={data.records_per_patient} makes patients up, which a "
            "deployment must not; use null, and files.patient_column in each hospital's site.yaml"
        ]
    by_patient = isinstance(training, TrainingMechanism) and training.unit == "patient"
    if by_patient and simulation and (data.patient_column, data.records_per_patient) == (None,) * 2:
        return [
            "training.unit=patient: the records name no patients; give data.patient_column, or "
            "data.records_per_patient=N to make patients of N records up"
        ]
    return []


def _label_private(
    config: Config, method: Method | None, training: LabelPrivate, partition: Partition | None
) -> list[str]:
    """Return what a training that keeps labels alone private does not go with."""
    problems = []
    if not config.federation.simulation:
        problems.append(
            f"training={training.name} takes images as public, which a hospital's are not; use "
            "training=dp_sgd, or federation=simulation"
        )
    if config.data.records_per_patient is not None:
        problems.append(
            f"data.records_per_patient={config.data.records_per_patient} makes patients up by "
            f"labels, which training={training.name} keeps private; use null"
        )
    if config.teachers_per_client > 1:
        problems.append(
            f"teachers_per_client={config.teachers_per_client} divides records by their numbers, "
            f"which may follow labels that training={training.name} keeps private; use "
            "teachers_per_client=1"
        )
    if isinstance(partition, ByClass):
        problems.append(
            f"partition={partition.name} divides records by their labels, which "
            f"training={training.name} keeps private; use partition=iid"
        )
    if method and not isinstance(method, Central):
        problems.append(
            f"training={training.name} protects labels that nothing else reads; "
            f"method={name_of(method)} may: use method=central"
        )
    if config.privacy.target_epsilon is not None:
        problems.append(
            f"privacy.target_epsilon={config.privacy.target_epsilon:g} is a record's, of which "
            f"training={training.name} protects the label alone; set training.epsilon instead"
        )
    return problems


# --- what teaches nothing ---


def unread(training: Training, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that set keys of plain teachers where a training has its own keys."""
    if not hasattr(training, "learning_rate"):
        return []
    keys = tuple(f"teacher.{key}=" for key in ("epochs", "min_steps", "learning_rate", "momentum"))
    return [each for each in overrides if each.startswith((*keys, "teacher.batch_size="))]


def cautions(config: Config, training: Training, answers: Mechanism, plan: Plan) -> list[str]:
    """Return a sentence where a student is not going to learn from answers under their noise."""
    asked = sum(s.requests * s.queries for s in plan.stages if s.mechanism == answers)
    if not asked or _clarity(config, answers, asked) > NEAR_CHANCE:
        return []
    field = str(answers.calibrated_by)
    noise = f"answers={answers.name} with answers.{field}={getattr(answers, field):.4g}"
    fitting = f"answers.{field}={10 if field == 'epsilon_per_answer' else 0.1}"
    value = getattr(answers, field)
    if value >= 10 if field == "epsilon_per_answer" else value <= 0.1:
        remedy = "ask more, by rounds or queries_per_round"
    elif isinstance(training, TrainingMechanism):
        remedy = f"training={training.name} carries the proof already: use {fitting}"
    else:
        remedy = f"use many more teachers (teachers_per_client), or training=dp_sgd {fitting}"
    teachers = config.num_clients * config.teachers_per_client
    return [
        f"{noise}: the noise hides what {teachers:,} teacher{'s' if teachers > 1 else ''} can say "
        f"in {asked:,} queries, so expect a student near chance; {remedy}"
    ]


def _clarity(config: Config, answers: Mechanism, asked: int) -> float:
    """Return the squared ratio of signal to noise in all answers, if all teachers agree."""
    clients, teachers = config.num_clients, config.teachers_per_client
    if isinstance(answers, TopKRandomizedResponse):
        lies, odds = (answers.k or answers.num_classes) - 1, math.exp(answers.epsilon_per_answer)
        truth = (odds - 1) / (odds + lies) if math.isfinite(odds) else 1.0
        return asked * clients * (lies + 1) * truth**2
    if not isinstance(answers, NormalizedGradient | NoisyVotes | NoisyMax):
        return math.inf
    if not answers.noise_multiplier:
        return math.inf
    if isinstance(answers, NoisyMax):  # of a client's votes a label is left, as of a response
        return asked * clients * answers.num_classes * _truth(answers, teachers) ** 2
    draws = clients if answers.noise_at == "client" else 1
    return asked * (clients * teachers / answers.noise_multiplier) ** 2 / draws


def _truth(answers: NoisyMax, votes: int) -> float:
    """Return how much more probable the class of all votes is than any other one."""
    scale, others = answers.noise_multiplier, answers.num_classes - 1
    noise = np.linspace(-40.0, 40.0, 8001)  # in scales
    if answers.noise_law == "gumbel":
        largest = 1 / (1 + others * math.exp(-votes / scale))
        return largest - (1 - largest) / others
    if answers.noise_law == "gaussian":
        density, below = np.exp(-(noise**2) / 2) / math.sqrt(2 * math.pi), ndtr
    else:
        density, below = np.exp(-abs(noise)) / 2, _laplace_below
    largest = float(np.trapezoid(density * below(noise + votes / scale) ** others, noise))
    return largest - (1 - largest) / others


def _laplace_below(noise: NDArray[np.float64]) -> NDArray[np.float64]:
    tail = np.exp(-abs(noise)) / 2
    return np.where(noise < 0, tail, 1 - tail)
