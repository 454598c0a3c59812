"""Cards as the Hugging Face hub reads them: README.md of a student, and of synthetic images."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from fed_dpsd.accounts.card import SEEDED_NOTE, PrivacyCard
from fed_dpsd.server.completed import CompletedRun

TASK = "image-classification"
SIZES = {1e3: "n<1K", 1e4: "1K<n<10K", 1e5: "10K<n<100K", 1e6: "100K<n<1M", 1e7: "1M<n<10M"}
LARGEST = "10M<n<100M"


def model_card(run: CompletedRun, classes: Sequence[str], card: Mapping[str, Any]) -> str:
    """Return README.md of an exported student.

    Args:
        run: the run that trained it.
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
    if config.data.hub and config.data.path is None:
        metadata["datasets"] = [config.data.hub]
    scores = {"accuracy": ("accuracy", "accuracy"), "auroc": ("roc_auc", "AUROC")}
    metrics = [
        {"type": kind, "value": summary[key]["student"], "name": shown}
        for key, (kind, shown) in scores.items()
        if summary[key]["student"] is not None
    ]
    if metrics:
        tested = {"name": summary["data"], "type": config.data.hub or summary["data"]}
        result = {"task": {"type": TASK}, "dataset": tested, "metrics": metrics}
        metadata["model-index"] = [{"name": name, "results": [result]}]
    sizes = [str(size) for size in config.data.shape]
    text = f"""\
# A student of {summary["method"]} on {summary["data"]}

A classifier of {" x ".join(sizes)} images into {len(classes)} classes. A server has distilled it
from what {config.num_clients:,} clients' teachers released.

{_privacy(card)}
## Use

```bash
pip install fed-dpsd
fed-dpsd predict student.safetensors IMAGE_OR_FOLDER
```

student.onnx maps `images`, (B, {", ".join(sizes)}) float32 in [0, 1], to `probabilities`,
(B, {len(classes)}) float32; `fed-dpsd export --format onnx` writes it.

Classes, in order: {", ".join(classes)}.

## Result

{card["run"]["result"]}

Accuracies are of {summary["accuracy"]["evaluated_on"]}. They say nothing about other images.
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

The run's own result: {card["run"]["result"]}
"""
    return _with_metadata(metadata, text)


def _tags(summary: Mapping[str, Any]) -> list[str]:
    """Return the subjects; differential privacy is one where a record has a guarantee."""
    claim = PrivacyCard(summary["privacy"]).epsilon("record", "add_remove")
    guaranteed = math.isfinite(claim.value) and SEEDED_NOTE not in claim.notes
    tags = ["fed-dpsd", TASK, "federated-learning", "knowledge-distillation"]
    return [*tags, "differential-privacy"] if guaranteed else tags


def _privacy(card: Mapping[str, Any]) -> str:
    """Return what is proven, in sentences."""
    verdict = "".join(f"- {line}\n" for line in card["verdict"])
    reviewed = "".join(f"- not reviewed: {plugin}\n" for plugin in card["not_reviewed"])
    return f"""\
## Privacy

{verdict}{reviewed}
{card["post_processing"]} PRIVACY.md has every number with its unit, relation, trust and delta, and
what is not covered.
"""


def _with_metadata(metadata: Mapping[str, Any], text: str) -> str:
    block = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)
    return f"---\n{block}---\n\n{text}"
