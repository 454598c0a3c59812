"""Model inversion on a sweep's runs: extract pictures of each class from a classifier.

Fredrikson, Jha, Ristenpart: "Model Inversion Attacks that Exploit Confidence Information and Basic
Countermeasures", CCS 2015; and a generator trained against the classifier, as in Fig. 8 of
arXiv 2601.19090. A failed attack proves nothing.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fed_dpsd.audits.claims import Say
from fed_dpsd.audits.shadows import Row, ShadowRun, Victim, facts, rows_of
from fed_dpsd.client.learning import train
from fed_dpsd.config import DataConfig
from fed_dpsd.data.intake import Records
from fed_dpsd.models import initialise, to_vector, torch_threads
from fed_dpsd.models.classifiers import CLASSIFIERS, Classifier
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.inference import predict, to_bytes
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.progress import track
from fed_dpsd.streams import Streams

Images = NDArray[np.uint8]
Attack = Literal["fredrikson", "generative"]
ATTACKS: tuple[Attack, ...] = ("fredrikson", "generative")

PER_CLASS = 10  # pictures of each class that are scored
STEPS, RATE = 60, 0.1  # of Fredrikson's descent by Adam, on pixels in [0, 1]
GENERATOR_STEPS, GENERATOR_RATE, BATCH = 150, 0.005, 50
LATENT_SIZE = 64
DIVERSITY = 0.1  # weight of the term that prevents identical pictures of a class
RECOGNISER, RECOGNISER_WIDTH = "cnn", 16
LEARNING: dict[str, Any] = {"epochs": 3, "min_steps": 600, "batch_size": 64, "learning_rate": 0.002}
COMPARED_OF_A_CLASS = 300  # the most members (and as many others) to compare a picture with
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Score:
    """Quality of an attack's pictures, by a classifier of the data set and by its records."""

    # Inception score by the classifier, from 1 to the number of classes (Salimans et al., arXiv
    # 1606.03498)
    inception: float
    recognised: float  # fraction of the pictures that the classifier assigns to the attacked class
    # fraction of the pictures with a member as the nearest record, among equally many members and
    # non-members of each class; 0.5 if pictures reveal nothing about membership
    nearest_member: float
    # fraction that the attacked model assigns to the class; if small, the attack has not converged
    # and is inconclusive. NaN for pictures of a control.
    reached: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attack on one model of each run of a setting."""

    setting: str
    victim: Victim | Literal[""]  # the attacked model; "" for pictures of a control
    attack: Attack | Literal[""]  # the attack; "" for pictures of a control
    scores: tuple[Score, ...]  # one for each run
    pictures: Images  # (K, C, H, W), a picture of each class from the first run
    row: Row  # the setting; for a control, the setting with the same data

    def to_row(self) -> dict[str, Any]:
        """Return the outcome as a row of the table."""
        row: dict[str, Any] = {
            "setting": self.setting,
            "victim": self.victim,
            "attack": self.attack,
        }
        for field in dataclasses.fields(Score):
            values = [getattr(score, field.name) for score in self.scores]
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            row |= {field.name: float(np.mean(values)), f"{field.name}_deviation": spread}
        return row | (facts(self.row, self.victim) if self.victim else {})


def attack(path: Path, say: Say) -> Iterator[Outcome]:
    """Attack a student and a teacher of each run in a sweep's folder or table, after controls.

    The controls are pictures of the test split, random pixels, and the attacks on an untrained
    teacher.
    """
    recognisers: dict[DataConfig, Classifier] = {}
    known: set[bytes] = set()
    with torch_threads(1):
        for number, row in enumerate(rows_of(path)):
            data = row.runs[0].experiment.config.data
            if data not in recognisers:
                say(f"the classifier that judges pictures of {data.name}")
                recognisers[data] = train_recogniser(row.runs[0])
            victims = row.runs[0].victims
            if number == 0:
                yield from _controls(row, recognisers[data])
                victims = ("untrained teachers", *victims)
            for victim in victims:
                weights = to_vector(_model(row.runs[0], victim)).numpy().tobytes()
                if weights in known:
                    say(f"{row.name}: {victim}: the same models as in an earlier row")
                    continue
                known.add(weights)
                for name in ATTACKS:
                    say(f"{row.name}: {victim}, {name}")
                    yield _outcome(row, victim, name, recognisers[data])


def _outcome(row: Row, victim: Victim, name: Attack, recognising: Classifier) -> Outcome:
    drawn = []
    for run in track("runs", row.runs):
        judge, model = Judge.of(run, victim, recognising), _model(run, victim)
        pictures, labels = invert(name, model, run.experiment.config.data.shape, judge.streams)
        reached = float((predict(model, pictures, CPU).argmax(1) == labels).mean())
        score = dataclasses.replace(judge.score(pictures, labels), reached=reached)
        drawn.append((score, pictures[::PER_CLASS]))
    scores, shown = zip(*drawn, strict=True)
    return Outcome(row.name, victim, name, scores, shown[0], row)


def _controls(row: Row, recognising: Classifier) -> Iterator[Outcome]:
    test = row.runs[0].data.test
    classes = np.unique(test.labels)
    chosen = [np.flatnonzero(test.labels == label)[:PER_CLASS] for label in classes]
    first, labels = [part[0] for part in chosen], test.labels[np.concatenate(chosen)]
    images = test.images[np.concatenate(chosen)]
    judges = [Judge.of(run, "student", recognising) for run in row.runs]
    scores = tuple(judge.score(images, labels) for judge in judges)
    yield Outcome("pictures of the test split", "", "", scores, test.images[first], row)
    drawn = [
        judge.streams.numpy("random pixels").integers(0, 256, images.shape, np.uint8)
        for judge in judges
    ]
    scores = tuple(judge.score(own, labels) for judge, own in zip(judges, drawn, strict=True))
    yield Outcome("random pixels", "", "", scores, drawn[0][: len(classes)], row)


def _model(run: ShadowRun, victim: Victim) -> Classifier:
    """Return the attacked model of a run; for teachers, the first client's first teacher."""
    if victim == "student":
        return run.student()
    if victim == "untrained teachers":
        return run.untrained(0)
    teacher = run.teachers(0).models[0]
    assert teacher is not None  # a client without records has none
    return teacher


# --- attacks ----------------------------------------------------------------------------------


def invert(
    name: Attack, model: nn.Module, shape: tuple[int, ...], streams: Streams
) -> tuple[Images, NDArray[np.int64]]:
    """Extract (K * PER_CLASS, C, H, W) pictures from a classifier, and their classes."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    num_classes = model(torch.zeros((1, *shape))).shape[1]
    labels = torch.arange(num_classes).repeat_interleave(PER_CLASS)
    attacked = fredrikson if name == "fredrikson" else generative
    purpose = "inversion" if name == "fredrikson" else "generative inversion"
    pictures = attacked(model, shape, labels, streams.torch(purpose))
    return to_bytes(pictures), labels.numpy()


def fredrikson(
    model: nn.Module, shape: tuple[int, ...], labels: torch.Tensor, rng: torch.Generator
) -> torch.Tensor:
    """Descend on pixels until the model is sure of the label; return (B, C, H, W) in [0, 1].

    The paper starts from a black image and descends on 1 - p. Here it starts from dim random
    pixels, to get many pictures of a class, and descends on -log p, whose gradient does not vanish.
    """
    pixels = 0.2 * torch.rand((len(labels), *shape), generator=rng)
    pixels.requires_grad_(True)
    optimiser = Adam([pixels], RATE)
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(pixels), labels, reduction="sum")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
    return pixels.detach()


def generative(
    model: nn.Module, shape: tuple[int, ...], labels: torch.Tensor, rng: torch.Generator
) -> torch.Tensor:
    """Train a generator of all classes against the model; return (B, C, H, W) pictures in [0, 1].

    Its inputs are a latent vector and a class. Its loss rewards images with a class that the model
    recognises, and different pictures for different latent vectors (mode seeking: Mao et al., arXiv
    1903.05628). The attack of Fig. 8 (Zhang et al., CVPR 2020) also uses public pictures of the
    same kind. Pictures from any model would then resemble them, so they are not used here.
    """
    num_classes = int(labels.max()) + 1
    generator = initialise(lambda: Generator(shape, LATENT_SIZE + num_classes, 32), rng)
    generator.draw_levels(rng)
    optimiser = Adam(generator.parameters(), GENERATOR_RATE)

    def draw(classes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.randn((len(classes), LATENT_SIZE), generator=rng)
        chosen = functional.one_hot(classes, num_classes).float()
        return latents, generator(torch.cat([latents, 5 * chosen], 1))

    for _ in range(GENERATOR_STEPS):
        classes = torch.randint(num_classes, (BATCH // 2,), generator=rng).repeat(2)
        latents, pictures = draw(classes)
        loss = functional.cross_entropy(model(pictures), classes)
        apart = [
            (each[: BATCH // 2] - each[BATCH // 2 :]).abs().mean() for each in (latents, pictures)
        ]
        loss = loss + DIVERSITY * apart[0] / (apart[1] + 0.01)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        return draw(labels)[1]


# --- scores -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """A classifier of the data set, and the records to compare pictures with."""

    classifier: Classifier  # network from (B, C, H, W) images in [0, 1] to (B, K) logits
    members: Images  # (M, C, H, W) records that the attacked model was trained on
    others: Images  # (M, C, H, W) records that it was not trained on, the same number per class
    streams: Streams

    @classmethod
    def of(cls, run: ShadowRun, victim: Victim, classifier: Classifier) -> "Judge":
        """Return the judge of a run, with equally many members and non-members of each class.

        A class with more members has better pictures, and more of them are near a member in any
        case. A teacher's records are the ones that its client holds or would hold.
        """
        records, included = run.data.train, run.included
        streams = Streams(run.experiment.config.seed)
        rng = streams.numpy("compared")
        part = np.arange(len(records)) if victim == "student" else run.holders[0]
        members, others = [], []
        for label in range(run.experiment.config.data.num_classes):
            own = part[records.labels[part] == label]
            inside, outside = (
                rng.permutation(own[included[own] == here]) for here in (True, False)
            )
            number = min(COMPARED_OF_A_CLASS, len(inside), len(outside))
            members.append(records.images[inside[:number]])
            others.append(records.images[outside[:number]])
        return cls(classifier, np.concatenate(members), np.concatenate(others), streams)

    def score(self, pictures: Images, labels: NDArray[np.int64]) -> Score:
        """Score (B, C, H, W) pictures made for (B,) classes."""
        probabilities = predict(self.classifier, pictures, CPU)
        nearest = [
            torch.cdist(_flatten(pictures), _flatten(records)).amin(1)
            for records in (self.members, self.others)
        ]
        return Score(
            inception_score(probabilities),
            float((probabilities.argmax(1) == labels).mean()),
            float((nearest[0] < nearest[1]).float().mean()),
        )


def _flatten(images: Images) -> torch.Tensor:
    return torch.from_numpy(images).flatten(1).float() / 255


def inception_score(probabilities: NDArray[np.floating]) -> float:
    """Return exp(mean divergence of (B, K) probabilities from their mean), in [1, K]."""
    rows = np.maximum(probabilities.astype(np.float64), 1e-12)
    divergence = (rows * (np.log(rows) - np.log(rows.mean(0)))).sum(1)
    return float(np.exp(divergence.mean()))


def train_recogniser(run: ShadowRun) -> Classifier:
    """Return a classifier trained on the whole training split, members and non-members."""
    config = run.experiment.config
    shape, num_classes = config.data.shape, config.data.num_classes
    build = CLASSIFIERS[RECOGNISER]
    model = initialise(
        lambda: build(shape, num_classes, RECOGNISER_WIDTH), Streams(0).torch("recogniser")
    )
    # Its settings are fixed, so all settings of a sweep have the same judge.
    settings = dataclasses.replace(config.teacher, **LEARNING, momentum=None)
    known = Records(run.data.train.images, run.data.train.labels)
    rng = Streams(0).torch("recogniser batches")
    train(model, known, dataclasses.replace(config, teacher=settings), rng)
    return model.eval()
