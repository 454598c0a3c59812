"""Cards as the Hugging Face hub reads them: README.md of a student, and of synthetic images."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from fed_dpsd.accounts.card import SEEDED_NOTE, PrivacyCard
from fed_dpsd.accounts.verdict import is_meaningful
from fed_dpsd.server.cards import NOTHING_PROVEN
from fed_dpsd.server.completed import CompletedRun

TASK = "image-classification"
SIZES = {1e3: "n<1K", 1e4: "1K<n<10K", 1e5: "10K<n<100K", 1e6: "100K<n<1M", 1e7: "1M<n<10M"}
LARGEST = "10M<n<100M"


def model_card(
    run: CompletedRun, file: str, classes: Sequence[str], card: Mapping[str, Any]
) -> str:
    """Return README.md of an exported student.

    Args:
        run: the run that trained it.
        file: the name of its file beside it.
        classes: the names of its classes, in order.
        card: its privacy card.
    """
    config, summary = run.experiment.config, run.summary
    name = f"{summary['method']}-{summary['data']}"
    metadata: dict[str, Any] = {
        "library_name": "fed-dpsd",
        "pipeline_tag": TASK,
        "tags": _tags(summary),
    }
    hub = config.data.hub if config.data.path is None else None
    if hub:
        metadata["datasets"] = [hub]
    scores = {"accuracy": ("accuracy", "accuracy"), "auroc": ("roc_auc", "AUROC")}
    metrics = [
        {"type": kind, "value": summary[key]["student"], "name": shown}
        for key, (kind, shown) in scores.items()
        if summary[key]["student"] is not None
    ]
    if metrics:
        tested = {"name": summary["data"], "type": hub or summary["data"]}
        result = {"task": {"type": TASK}, "dataset": tested, "metrics": metrics}
        metadata["model-index"] = [{"name": name, "results": [result]}]
    sizes = [str(size) for size in config.data.shape]
    text = f"""\
# A student of {summary["method"]} on {summary["data"]}

A classifier of {" x ".join(sizes)} images into {len(classes)} classes, made of what
{config.num_clients:,} client{"s" * (config.num_clients != 1)} released to a server.

{_privacy(card)}
## Use

```bash
pip install fed-dpsd
fed-dpsd predict {file} IMAGE_OR_FOLDER
```

An ONNX file, which `fed-dpsd export --format onnx` writes, maps `images`,
(B, {", ".join(sizes)}) float32 in [0, 1], to `probabilities`, (B, {len(classes)}) float32.

Classes, in order: {", ".join(classes)}.

## Result

{card["run"]["result"]}

{_evaluated(summary)} A published epsilon is a paper's formula, and guarantees nothing.
"""
    return _with_metadata(metadata, text)


def dataset_card(
    run: CompletedRun, file: str, number: int, origin: str, labelled: bool, card: Mapping[str, Any]
) -> str:
    """Return README.md of synthetic images.

    Args:
        run: the run that they are from.
        file: the name of the parquet file beside it.
        number: how many images the file holds.
        origin: how they were drawn, a sentence.
        labelled: whether the student has labelled them.
        card: their privacy card.
    """
    summary = run.summary
    metadata = {
        "pretty_name": f"Synthetic images of {summary['method']} on {summary['data']}",
        "task_categories": [TASK],
        "size_categories": [next((s for n, s in SIZES.items() if number < n), LARGEST)],
        "tags": ["synthetic", *_tags(summary)],
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": file}]},
        ],
    }
    labels = (
        "`label` is the student's most probable class, `probabilities` are those of all classes. "
        "Neither is anybody's diagnosis.\n"
        if labelled
        else "They have no labels.\n"
    )
    text = f"""\
# Synthetic images of {summary["method"]} on {summary["data"]}

{number:,} images. {origin} {labels}
{_privacy(card)}
## Use

```python
from datasets import load_dataset

images = load_dataset("parquet", data_files="{file}", split="train")
```

The run's own result: {card["run"]["result"]}. A published epsilon is a paper's formula, and
guarantees nothing.
"""
    return _with_metadata(metadata, text)


def _evaluated(summary: Mapping[str, Any]) -> str:
    """Return what a student's accuracy is of."""
    if summary["accuracy"]["student"] is None:
        return "The student was not scored."
    images = summary["accuracy"]["evaluated_on"]
    return f"Accuracies are of {images}. They say nothing about other images."


def _tags(summary: Mapping[str, Any]) -> list[str]:
    """Return the subjects; differential privacy is one where a record has a guarantee."""
    card = PrivacyCard(summary["privacy"])
    claim = card.epsilon("record", "add_remove")
    guaranteed = is_meaningful(claim) and SEEDED_NOTE not in claim.notes and not card.review
    tags = ["fed-dpsd", TASK, "federated-learning", "knowledge-distillation"]
    return [*tags, "differential-privacy"] if guaranteed else tags


def _privacy(card: Mapping[str, Any]) -> str:
    """Return what is proven, in sentences, and what is not; the verdict has who is unprotected."""
    left_out = [line for line in card["not_covered"] if NOTHING_PROVEN not in line]
    reviewed = [f"not reviewed: {plugin}" for plugin in card["not_reviewed"]]
    return f"""\
## Privacy

{_bullets(card["verdict"] + reviewed)}
{card["post_processing"]} PRIVACY.md has every number with its unit, relation, trust and delta.

Not covered:

{_bullets(left_out)}
Notes on the numbers:

{_bullets(card["notes"])}"""


def _bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _with_metadata(metadata: Mapping[str, Any], text: str) -> str:
    block = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)
    return f"---\n{block}---\n\n{text}"
