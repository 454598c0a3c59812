"""Each pair of method, training and answers learns, is refused, or warns with a remedy.

`python -m tests.test_defaults` measures what results/defaults.csv lacks, or with --again all of it,
and rewrites it and results/defaults.md; it takes up to a minute for each different run.
"""

import csv
import itertools
import json
import sys
import tempfile
from pathlib import Path

import pytest

import fed_dpsd
from fed_dpsd.errors import ConfigError
from fed_dpsd.experiment import Experiment, from_overrides
from fed_dpsd.server.run_folder import versions

ROOT = Path(__file__).parents[1]
TABLE, PAGE = ROOT / "results/defaults.csv", ROOT / "results/defaults.md"
AXES = {
    axis: sorted(path.stem for path in (ROOT / "conf" / axis).glob("*.yaml"))
    for axis in ("method", "training", "answers")
}
FIELDS = ("typed", "outcome", "student", "ensemble", "says", "commit")
SCORES = ("student", "ensemble", "commit")
HOPELESS = "near chance", "far below its teachers"  # in warnings of runs that are not measured


def typed():
    """All settings of one or two of the three keys."""
    pairs = [()] + [(f"{axis}={name}",) for axis in AXES for name in AXES[axis]]
    for one, other in itertools.combinations(AXES, 2):
        pairs += itertools.product(*([f"{a}={name}" for name in AXES[a]] for a in (one, other)))
    return [" ".join(pair) for pair in pairs]


def judged(text):
    """The experiment of some settings, or the first problem; and the first warning."""
    try:
        experiment = from_overrides(text.split(), Path.cwd())
    except ConfigError as error:
        return error.problems[0], ""
    return experiment, next(iter(experiment.warnings), "")


def hopeless(warning):
    return any(text in warning for text in HOPELESS)


def identity(experiment: Experiment):
    """What a student depends on: answers only if clients give any."""
    plan = experiment.plan
    config = json.loads(experiment.to_json())
    del config["method"]["name"]  # DGD+ is DGD with other answers
    if experiment.answers not in [stage.mechanism for stage in plan.stages]:
        del config["answers"]
    return json.dumps(config)


def measured(text, out):
    """The accuracies of the student and of the ensemble of its teachers."""
    run = fed_dpsd.run(*text.split(), "evaluate_every=1000", f"out={out}", progress=False)
    accuracy, diagnostics = run.summary["accuracy"], run.summary["diagnostics"]
    ensemble = accuracy["ensemble"] or diagnostics.get("accuracy", {}).get("ensemble")
    return accuracy["student"], ensemble


def learns(student, ensemble):
    """Whether a student has half of the ensemble's accuracy; methods without one of both do."""
    return student is None or (student >= (ensemble or 0) / 2 and student > 0.2)


def rows():
    with TABLE.open() as file:
        return list(csv.DictReader(file))


LEARNING = {}  # one of the settings for each different run
if TABLE.exists():
    for _row in rows():
        if _row["outcome"] == "learns":
            LEARNING.setdefault((_row["student"], _row["ensemble"]), _row["typed"])


def test_noise_of_answers_suits_the_training():
    gradients = {
        "answers=gradient": 0.1,
        "training=plain answers=gradient": 100,
        "answers=gradient answers.noise_multiplier=null": 0.1,
        "answers=gradient answers.noise_multiplier=7": 7,
        "answers=gradient answers.noise_at=distributed answers.quorum={threshold:4}": 0.1,
        "training=plain answers=votes": 100,
        "answers=votes": 0.1,
        "training=plain answers=noisy_max": 4,
        "answers=noisy_max": 0.1,
        "method=dpdfd": 100,
        "method=dgd": 4,
    }
    for text, noise in gradients.items():
        experiment, _ = judged(text)
        assert experiment.answers.noise_multiplier == noise, text
        assert experiment.config.answers["noise_multiplier"] == noise
    # A run's own configuration names its noise, and is bound again without looking it up.
    again = from_overrides(["answers=gradient", "answers.noise_multiplier=0.1"], Path.cwd())
    assert again.to_json() == judged("answers=gradient")[0].to_json()


def test_a_key_that_another_choice_sets_is_refused_with_a_remedy():
    problem, _ = judged("method=dp_dfd answers=gradient")
    assert problem.endswith("has no answers.threshold, which method=dp_dfd sets; use answers=label")


def test_the_table_has_no_run_that_learns_nothing_without_a_warning():
    found = rows()
    lacking = {*typed()} ^ {row["typed"] for row in found}
    assert not lacking, "results/defaults.csv: run `python -m tests.test_defaults`"
    for row in found:
        if row["outcome"] == "learns":
            scores = (float(row[key]) if row[key] else None for key in ("student", "ensemble"))
            assert learns(*scores), row["typed"]
        else:
            assert row["outcome"] in ("warned", "refused")
            assert "use " in row["says"], row["typed"]


@pytest.mark.slow(seconds=20)
def test_what_the_table_calls_warned_or_refused_is():
    """Sets up 392 runs."""
    wrong = {}
    for row in rows():
        experiment, warning = judged(row["typed"])
        said = experiment if isinstance(experiment, str) else warning
        outcome = "refused" if isinstance(experiment, str) else "warned"
        if row["outcome"] != "learns" and (outcome, said) != (row["outcome"], row["says"]):
            wrong[row["typed"]] = said
        if row["outcome"] == "learns" and (outcome == "refused" or hopeless(said)):
            wrong[row["typed"]] = said
    assert not wrong


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("text", [*LEARNING.values()][::8], ids=lambda text: text or "default")
def test_a_run_learns(text, tmp_path):
    """A whole run of a sample of the matrix: up to a minute."""
    assert learns(*measured(text, tmp_path))


def cell(row):
    if row["outcome"] != "learns":
        return row["outcome"]
    student, ensemble = (
        f"{100 * float(row[key]):.1f}" if row[key] else "-" for key in ("student", "ensemble")
    )
    return f"{student}/{ensemble}"


def page(found):
    """The page, whose text stands here so that the command writes all of it."""
    by = {row["typed"]: row for row in found}
    commits = sorted({row["commit"][:8] for row in found if row.get("commit")})
    where = f"Commits: {', '.join(commits)}" if commits else "The rows' commit is not recorded"
    lines = [
        "# Which method, training and answers go together?",
        "",
        "Each pair learns, is refused, or warns before it starts and names the key to change.",
        "All other settings are the defaults: digits, five clients, seed 0. A cell has the",
        "accuracies of the student and of its teachers together, in %; `local` has no student.",
        f"{where} ([what is repeated](README.md#where-are-the-rows-from)).",
        "",
        "    python -m tests.test_defaults",
        "",
        "With `training=dp_sgd` the default noise of `gradient`, `votes` and `noisy_max` is 0.1,",
        "since the training covers any answers; otherwise it is the papers'. [Rows](defaults.csv)",
        "with the warnings and errors.",
    ]
    for one, other in (("answers", "training"), ("method", "training"), ("method", "answers")):
        columns = ["", *AXES[other]]
        head = [one, *(f"`{name}`" if name else "default" for name in columns)]
        lines += ["", f"## {one.capitalize()} and {other}", ""]
        lines += [f"|{'|'.join(head)}|", f"|{'---|' * len(head)}"]
        for name in ["", *AXES[one]]:
            cells = [f"`{name}`" if name else "default"]
            for column in columns:
                keys = {one: name, other: column}
                text = " ".join(f"{a}={keys[a]}" for a in AXES if keys.get(a))
                cells.append(cell(by[text]))
            lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines) + "\n"


def main():
    again = "--again" in sys.argv
    known = {row["typed"]: row for row in rows()} if TABLE.exists() and not again else {}
    found, results = [], {}
    for text in typed():
        experiment, warning = judged(text)
        row = {"typed": text, "student": "", "ensemble": ""}
        if isinstance(experiment, str):
            row |= {"outcome": "refused", "says": experiment}
        elif hopeless(warning):
            row |= {"outcome": "warned", "says": warning}
        else:
            key = identity(experiment)
            if key not in results:
                before = known.get(text, {"outcome": ""})
                if before["outcome"] == "learns":
                    results[key] = [before.get(name, "") for name in SCORES]
                else:
                    print(f"{text or 'default'} ...", file=sys.stderr)
                    with tempfile.TemporaryDirectory() as out:
                        scores = measured(text, out)
                    results[key] = ["" if s is None else f"{s:.4f}" for s in scores]
                    results[key].append(versions()["commit"] or "")
            student, ensemble, commit = results[key]
            scores = [float(each) if each else None for each in (student, ensemble)]
            outcome = "learns" if learns(*scores) else "warned" if warning else "fails"
            row |= {"outcome": outcome, "student": student, "ensemble": ensemble, "says": warning}
            row["commit"] = commit
        found.append(row)
    with TABLE.open("w") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
