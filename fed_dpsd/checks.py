"""Checks that an experiment's choices fit together; messages say what to use instead.

Methods, training, mechanisms and partitions, including plug-ins' own, check themselves. `check`
calls these checks, then checks the remaining keys.
"""

import math
from collections.abc import Sequence

from fed_dpsd.config import BUNDLED, Config, is_function
from fed_dpsd.data.partition import Partition
from fed_dpsd.errors import UserError, format_value
from fed_dpsd.methods.method import Method, PublicContext
from fed_dpsd.models.classifiers import CLASSIFIERS, FIXED, NO_DP_SGD, OURS, on_meta
from fed_dpsd.models.own_networks import network_problem
from fed_dpsd.models.pretrained import public_of
from fed_dpsd.models.torchvision_networks import GROUP_FORMS
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import Training, TrainingMechanism

# Squared signal-to-noise ratios of a whole run up to which students are near chance, or have less
# than about half of their teachers' accuracy. On MNIST, a student is at chance at 128, and reaches
# 26.6 % at 1,024 and 54.1 % at 3,564 (results/data_sensitive.md). On digits, it reaches 23 to 34 %
# at 198, 28 % at 611, and 36 to 49 % at 2,500 (results/defaults.md). Runs with the least noise are
# just short.
NEAR_CHANCE, TOO_LITTLE, TOO_SHORT = 1_000, 3_000, 256

LARGEST_REQUEST = 2**29  # bytes of the images in a request


def check(
    config: Config,
    method: Method,
    training: Training,
    answers: Mechanism,
    partition: Partition,
) -> list[str]:
    """Return the problems of the choices together, each with key, value and remedy."""
    problems = (
        unknown_networks(config)
        + own_networks(config)
        + _data(config)
        + dp_sgd_networks(config, training, "training")
        + augmented_features(config, training)
    )
    problems += partition.check(config)
    problems += training.check(config, method, partition)
    problems += method.check(config, training, answers)
    problems += answers.check(config, method, training)
    if not problems:  # a plan needs choices that fit
        planned = method.plan(PublicContext(config, training, answers))
        problems += large_requests(config, planned, answers)
    return problems


def large_requests(config: Config, plan: Plan, answers: Mechanism) -> list[str]:
    """Return the number of images in a request if a message cannot hold them."""
    own = [stage for stage in plan.stages if stage.mechanism == answers]
    queries = max((stage.queries for stage in own), default=0)
    image = math.prod(config.data.shape)
    if not answers.from_teachers or queries * image <= LARGEST_REQUEST:
        return []
    fitting = LARGEST_REQUEST // image
    rounds = math.ceil(config.rounds * queries / fitting)
    size, most = (
        f"{math.ceil(count / 2**20):,} MiB" for count in (queries * image, LARGEST_REQUEST)
    )
    return [
        f"queries_per_round={config.queries_per_round}: a request has {queries:,} images of shape "
        f"{list(config.data.shape)}, {size}, and a message holds {most}; use "
        f"queries_per_round={fitting}, with more rounds for the same number of queries "
        f"(rounds={rounds})"
    ]


def _teachers_keys(config: Config) -> dict[str, str]:
    """Return the architectures of teachers that are trained, by the keys that name them."""
    if not config.model.teachers:
        return {"model.teacher": config.model.teacher}
    return {f"model.teachers[{i}]": name for i, name in enumerate(config.model.teachers)}


def unknown_networks(config: Config) -> list[str]:
    """Return the architectures that are unknown."""
    model, known = config.model, ", ".join(CLASSIFIERS)
    named = _teachers_keys(config) | {
        "model.teacher": model.teacher,
        "model.student": model.student,
    }
    if config.teacher.arch is not None:
        named["teacher.arch"] = config.teacher.arch
    return [
        f"{key}={name} is unknown; choose one of: {known}"
        for key, name in named.items()
        if name not in CLASSIFIERS and not is_function(name)
    ]


def missing_public_features(config: Config) -> list[str]:
    """Return why this process cannot compute the public features that it needs; [] if it can.

    A coordinator needs none for the teachers of hospitals.
    """
    here = {config.model.student}
    if config.federation.simulation:
        here |= set(map(config.architecture, range(config.num_clients)))
    if "pretrained" in here:
        try:
            public_of(config.model).require()
        except UserError as error:
            return [str(error)]
    return []


def own_networks(config: Config) -> list[str]:
    """Return why networks of plug-ins, or of this process's functions, cannot be used."""
    model = config.model
    problems = {
        key: _own_problem(config, name, model.teacher_width)
        for key, name in _teachers_keys(config).items()
    }
    problems["model.student"] = _own_problem(config, model.student, model.student_width)
    return [f"{key}={why}" for key, why in problems.items() if why]


def _own_problem(config: Config, name: str, width: int, bounds_gradients: bool = False) -> str:
    """Return why a network that is not ours cannot be used; "" if it can, or is not known here."""
    if name in OURS or name not in CLASSIFIERS:
        return ""
    data = config.data
    why = network_problem(name, data.shape, data.num_classes, width, bounds_gradients)
    return f"{name}: {why}" if why else ""


def dp_sgd_networks(config: Config, training: Training, key: str) -> list[str]:
    """Return the teachers' networks whose gradients the training that `key` names cannot bound."""
    if not isinstance(training, TrainingMechanism) or not training.bounds_gradients:
        return []
    fitting = ", ".join(name for name in CLASSIFIERS if name in OURS and name not in NO_DP_SGD)
    forms = {"resnet9": "resnet9_gn", **GROUP_FORMS}
    width, problems = config.model.teacher_width, []
    for where, name in list(_teachers_keys(config).items())[: config.num_clients]:
        if name in NO_DP_SGD:
            problems.append(
                f"{where}={name}: {key}={training.name} bounds each record's contribution, but the "
                f"layers of this network mix records; use {forms.get(name, 'cnn')}, or another of: "
                f"{fitting}"
            )
        elif _own_problem(config, name, width):
            continue  # `own_networks` reports it
        elif why := _own_problem(config, name, width, bounds_gradients=True):
            problems.append(f"{where}={why}; or use {key}=plain, without noise")
        elif name in CLASSIFIERS:
            network = on_meta(name, config.data.shape, config.data.num_classes, width)
            try:
                training.check_parameters(sum(each.numel() for each in network.parameters()))
            except ValueError as error:
                problems.append(f"{where}={name} {key}={training.name}: {error}")
    return problems


def fixed_networks(config: Config) -> dict[str, str]:
    """Return the teachers' networks that only train a linear classifier, by their keys."""
    data, width = config.data, config.model.teacher_width

    def fixed(name: str) -> bool:
        if name in OURS or name not in CLASSIFIERS or _own_problem(config, name, width):
            return name in FIXED
        return on_meta(name, data.shape, data.num_classes, width).fixed

    return {key: name for key, name in _teachers_keys(config).items() if fixed(name)}


def augmented_features(config: Config, training: Training) -> list[str]:
    """Return the settings that move images although teachers use features computed once."""
    if training.reads == "features":
        return []  # this training reads no teacher.* key
    moves = {"shift": config.teacher.shift, "flip": config.teacher.flip}
    return [
        f"teacher.{name}={format_value(value)}: {key}={network} computes the features of a "
        "record's image once, so the image cannot move; use "
        f"teacher.{name}={format_value(type(value)())}, or model=resnet9"
        for key, network in fixed_networks(config).items()
        for name, value in moves.items()
        if value
    ]


def _data(config: Config) -> list[str]:
    """Return the settings that this data set, or a deployment, does not allow.

    In a rehearsal, the hospitals' own records are named like the bundled digits.
    """
    data = config.data
    if not config.federation.simulation:
        if data.records_per_patient is None:
            return []
        return [
            f"data.records_per_patient={data.records_per_patient} makes up patients, which only "
            "simulations may do; use null, and files.patient_column in each hospital's site.yaml"
        ]
    if data.name != BUNDLED:
        return []
    if data.path is not None:
        return [
            f"data.path={data.path}: data={BUNDLED} comes with scikit-learn and reads no file; "
            f"use data=imagefolder data.path={data.path} for your own pictures"
        ]
    fixed = {"num_classes": 10, "shape": (1, 8, 8), "hub": None, "patient_column": None}
    return [
        f"data.{key}={format_value(getattr(data, key))}: data={BUNDLED} has {format_value(value)}; "
        "leave it out, or choose other data"
        for key, value in fixed.items()
        if getattr(data, key) != value
    ]


# --- settings without effect ---


def ignored_overrides(training: Training, overrides: Sequence[str]) -> list[str]:
    """Return overrides of plain training's keys that the chosen training ignores."""
    if training.reads != "features":
        return []
    names = (
        *("epochs", "min_steps", "batch_size", "learning_rate", "momentum", "weight_decay"),
        *("one_cycle", "shift", "flip"),
    )
    return [o for o in overrides if o.startswith(tuple(f"teacher.{name}=" for name in names))]


def warnings(
    config: Config, method: Method, training: Training, answers: Mechanism, plan: Plan
) -> list[str]:
    """Return a warning if the noise of the answers is too large for a student to learn."""
    queries = sum(s.requests * s.queries for s in plan.stages if s.mechanism == answers)
    teachers = config.num_clients * config.teachers_per_client
    squared_snr = queries * answers.squared_snr(config.num_clients, config.teachers_per_client)
    if not queries or squared_snr > TOO_LITTLE:
        return []
    field = str(answers.calibrated_by)
    value = getattr(answers, field)
    larger = field == "epsilon_per_answer"  # a larger value means less noise
    fitting = f"answers.{field}={10 if larger else 0.1}"
    if value >= 10 if larger else value <= 0.1:
        if squared_snr > TOO_SHORT:
            return []
        remedy = "send more queries, by rounds or queries_per_round"
    elif training.private:
        remedy = f"training={training.name} already gives a guarantee: use {fitting}"
    else:
        remedy = "use many more teachers (teachers_per_client)"
        suits = method.trainings is None or "dp_sgd" in method.trainings
        remedy += f", or training=dp_sgd {fitting}" if suits else " or queries_per_round"
    expected = "near chance" if squared_snr <= NEAR_CHANCE else "far below its teachers"
    return [
        f"answers={answers.name} with answers.{field}={value:.4g}: the noise hides what "
        f"{teachers:,} teacher{'s' * (teachers > 1)} can say in {queries:,} queries, so expect a "
        f"student {expected}; {remedy}"
    ]
