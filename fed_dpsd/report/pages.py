"""The files of `fed-dpsd report`: tables, figures, and pages from templates/."""

import base64
import functools
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup, escape
from PIL import Image

from fed_dpsd.accounts import words
from fed_dpsd.accounts.words import MEANINGFUL, MEANINGFUL_DELTA
from fed_dpsd.config.plugins import files_of
from fed_dpsd.errors import counted, printable, size_text
from fed_dpsd.privacy.epsilon import rounded_up
from fed_dpsd.report import charts, figures, guarantee, numbers, scores, sweep_charts, tables
from fed_dpsd.report.charts import Chart, Dots
from fed_dpsd.report.facts import NEVER, Facts, Unfinished
from fed_dpsd.report.numbers import wilson, with_interval
from fed_dpsd.report.settings import (
    CLAIMS,
    GRID,
    Row,
    Setting,
    contents_notes,
    differing_columns,
    rows_by_key,
    setting_names,
)
from fed_dpsd.report.tables import FIRST_LINE, SUMMARY_START, write_own
from fed_dpsd.storage import jinja_environment

UNFINISHED = "results.html"  # the page of the completed run has the same name
OFFICER = "privacy_officer.html"
RECORD, REPLACED = CLAIMS[:2]
MOST_CLIENTS = 50  # rows of a table
MOST_CLASSES = 20  # of a matrix
MOST_LETTERS = 40  # of all class names together, as column titles of a printed matrix
MOST_SHADE = 0.55  # numbers on darker cells are hard to read
MOST_LINES = 8  # settings in one chart
MOST_PRINTED = 7  # settings in one chart of a paper
PICTURES = 6
LARGEST_PICTURE = 400  # pixels; larger ones are scaled down
LARGEST_SHEET = 1_000  # pixels, of eight test images
SCORE_NAMES = {
    f"{prefix}{column}": f"{name}, {metric}"
    for prefix, metric in (("", "accuracy"), ("auroc_", "AUROC"))
    for column, name in (
        ("student", "student"),
        ("weighted_ensemble", "ensemble, weighted by class counts"),
        ("ensemble", "ensemble of all teachers"),
        ("client_best", "best client alone"),
        ("client_mean", "mean of clients alone"),
    )
}
REQUESTS = {"counts": "class counts", "weights": "weights", "baseline": "weights"}


def write_unfinished(run: Facts, folder: Path) -> Path:
    """Write the page of an unfinished run to where the completed run's page will be."""
    return write_own(folder / UNFINISHED, run_page(run))


def write(
    settings: Sequence[Setting],
    paths: Sequence[Path],
    folder: Path,
    against: str | None = None,
    run: Facts | None = None,
    unfinished: Sequence[Unfinished] = (),
    title: str = "",
) -> Iterator[Path]:
    """Write the files, named after the first of the settings' tables, and yield each path."""
    stem = paths[0].stem
    differences = tables.differences(settings, against) if against else []
    rounds = rows_by_key(paths, "rounds", sweep_charts.ROUND_COLUMNS)
    progress = sweep_charts.over_rounds(settings, rounds, MOST_PRINTED)
    by_key = sweep_charts.over_keys(settings, MOST_PRINTED)
    epsilons = sweep_charts.over_epsilon(settings, MOST_PRINTED)
    compared = sweep_charts.dots([s for s in settings if GRID in s.values])
    yield write_own(folder / f"{stem}.md", tables.markdown(settings, differences))
    yield write_own(folder / f"{stem}_summary.csv", tables.summary(settings), SUMMARY_START)
    if len(settings) > 1:
        table = tables.Grid.of(settings).latex(stem)
        yield write_own(folder / f"{stem}.tex", table, tables.LATEX_START)
    for width in (figures.TEXT, figures.COLUMN):
        across = 2 if width == figures.TEXT else 1
        drawn = {
            "": figures.draw(epsilons, width),
            "_settings": figures.draw_dots(compared, width),
            "_progress": figures.draw(progress, width, across),
        }
        for key, own in by_key.items():
            drawn[f"_{key}"] = figures.draw(own, width, min(across, len(own)))
        for kind, figure in drawn.items():
            for suffix in ("png", "pdf", "svg") if across == 2 else ("pdf", "svg"):
                name = f"{stem}{kind}{'' if across == 2 else '_column'}.{suffix}"
                if figure:
                    yield figures.save(figure, folder / name)
    if run:
        yield write_own(folder / OFFICER, officer_page(run))
        page = run_page(run)
    else:
        page = sweep_page(stem, settings, rounds, differences, unfinished, title)
    yield write_own(folder / f"{stem}.html", page)


# --- templates ---

SPACES = "\n\t\u00a0\u202f"  # that HTML or its author means


def _escaped(value: object) -> Markup:
    """Escape text for HTML, and what does not print."""
    return value if isinstance(value, Markup) else escape(printable(str(value), SPACES))


def _to_html(value: object) -> object:
    """Convert plain text to HTML: backticks mark code, and numbers do not wrap."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    text = re.sub(r"\b(\de-\d+)\b", r'<span class="whole">\1</span>', str(_escaped(value)))
    text = re.sub(r"(\d) %", "\\1\u00a0%", text)
    text = re.sub(r"\((\d[\d.]*) to (\d[\d.]*)\)", "(\\1\u00a0to\u00a0\\2)", text)
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", text))


def _svg(chart: Chart | Dots) -> tuple[str, Markup]:
    figure = figures.draw_dots([chart]) if isinstance(chart, Dots) else figures.draw([chart])
    assert figure
    box, content = figures.to_svg(figure, chart.name)
    return box, Markup(content)


@functools.cache
def _environment() -> Environment:
    environment = jinja_environment(__file__, autoescape=True, finalize=_to_html)
    shared = (*("percent", "percent_at_most", "percents", "score", "duration"),)
    environment.filters |= {name: getattr(numbers, name) for name in shared}
    more: dict[str, Callable[..., Any]] = {
        "capitalised": lambda text: f"{text[:1].upper()}{text[1:]}",
        "commas": "{:,}".format,
        "counted": counted,
        "e": _escaped,
        "interval": lambda counts: "{:.1f} to {:.1f}".format(*100 * np.array(wilson(*counts))),
        "json": json.dumps,
        "legend": lambda setting: (setting.all_of("trust"), setting.all_of("delta")),
        "rounded_up": rounded_up,
        "size": size_text,
        "svg": _svg,
        "with_interval": lambda counts: with_interval(*counts),
    }
    environment.filters |= more
    environment.tests["finite"] = math.isfinite
    environment.globals |= {
        "first_line": Markup(FIRST_LINE),
        "guarantee": guarantee,
        "spread": numbers.spread,
        "words": words,
    }
    return environment


def _render(template: str, **content: Any) -> str:
    return _environment().get_template(template).render(content)


# --- the page of a run ---


def run_page(facts: Facts) -> str:
    """Return the page of a run or of a deployment."""
    calibration = facts.summary["calibration"]
    return _render(
        "run.html.j2",
        facts=facts,
        over_rounds=charts.over_rounds(facts),
        response_times=charts.response_times(facts),
        calibration=charts.calibration(calibration) if calibration else [],
        overconfident=calibration and charts.overconfidence(calibration) > 0,
        pictures=_pictures(facts),
        sheet=_sheet(facts),
        refused=Counter(int(client) for line in facts.rounds for client in line["refused"]),
        settings=sorted(facts.settings.items(), key=lambda item: item[0].rpartition(".")[0]),
        most_clients=MOST_CLIENTS,
        **_performance(facts),
        **_classes(facts),
        **({} if facts.simulated else _hospitals(facts)),
    )


def officer_page(facts: Facts) -> str:
    """Return the page for a privacy officer; every number is from the card's proven epsilons."""
    return _render("privacy_officer.html.j2", facts=facts)


def _performance(facts: Facts) -> dict[str, Any]:
    confusion, predictions = facts.summary["confusion"], facts.predictions
    if not confusion or not facts.correct_and_total:
        return {"measures": [], "area": None, "balanced": None, "operating": [], "roc": []}
    two = len(facts.classes) == 2
    area_name = f"AUROC for {facts.classes[1]}" if two else "mean AUROC over classes"
    area = scores.auroc_with_interval(predictions) if predictions else None
    balanced = scores.mean_rate([(row[k], sum(row)) for k, row in enumerate(confusion)])
    operating = []
    if two and predictions and area:  # both classes are in the test images
        operating = scores.operating_points(predictions, facts.threshold)
    measures = [["accuracy", with_interval(*facts.correct_and_total), "Wilson"]]
    if common := facts.most_common:
        name = f"accuracy of always answering {common[0]}, the most common class"
        measures.append([name, numbers.percent(common[1]), "-"])
    if area:
        measures.append([area_name, numbers.score(area), "DeLong, on the logit scale"])
    elif (known := facts.summary["auroc"]["student"]) is not None:
        measures.append([area_name, f"{known:.3f}", "-"])
    if balanced:
        name = "balanced accuracy: the mean over classes of sensitivity"
        measures.append([name, numbers.percents(balanced), "Wilson, combined over classes (MOVER)"])
    others = {"specificity": scores.specificities(confusion)}
    others["precision"] = [
        (row[k], sum(o[k] for o in confusion)) for k, row in enumerate(confusion)
    ]
    for name, counts in others.items():
        if not two and (mean := scores.mean_rate(counts)):
            measures.append([f"{name}, mean over classes", numbers.percent(mean[0]), "-"])
    return {
        **{"measures": measures, "area": area, "area_name": area_name, "balanced": balanced},
        "operating": operating,
        "roc": charts.roc(predictions, operating, facts.classes[-1]),
        "by_patient": bool(facts.settings.get("data.patient_column")),
    }


def _pictures(facts: Facts) -> list[tuple[int, str, float | None]]:
    """Return the number, base64 PNG and agreement of some rounds, from first to last."""
    rounds = sorted(facts.samples)
    some = sorted(
        {rounds[round(i * (len(rounds) - 1) / (PICTURES - 1))] for i in range(PICTURES)}
        if rounds
        else ()
    )
    agreement = {line["round"]: line.get("agreement") for line in facts.rounds}
    return [
        (
            number,
            base64.b64encode(shrink_png(facts.samples[number])).decode(),
            agreement.get(number),
        )
        for number in some
    ]


def _sheet(facts: Facts) -> list[tuple[str, str]]:
    """Return the class and the base64 PNG of each picture of test images, in order."""
    return [
        (facts.classes[label], base64.b64encode(shrink_png(path, LARGEST_SHEET)).decode())
        for label, path in sorted(facts.test_images.items())
    ]


def shrink_png(path: Path, largest: int = LARGEST_PICTURE) -> bytes:
    """Return a PNG of a grid of images that is small enough for a page."""
    with Image.open(path) as picture:
        red, green, blue = picture.convert("RGB").split()
        small = picture.convert("L" if red == green == blue else "RGB")
    small.thumbnail((largest, largest))
    content = io.BytesIO()
    small.save(content, "PNG", optimize=True)
    return content.getvalue()


def _classes(facts: Facts) -> dict[str, Any]:
    counts, classes = facts.summary["confusion"] or [], facts.classes
    each_class, matrix = [], []
    for k, row in enumerate(counts):
        images, named = sum(row), sum(other[k] for other in counts)
        most, other = max((n, -c) for c, n in enumerate(row) if c != k)
        worst = f"{classes[-other]} ({most:,})" if most else "-"
        right = [with_interval(row[k], images), with_interval(row[k], named)]
        each_class.append([classes[k], f"{images:,}", *right, worst])
        matrix.append((classes[k], [(n, MOST_SHADE * n / (images or 1)) for n in row]))
    return {
        "each_class": each_class,
        "matrix": matrix if len(counts) <= MOST_CLASSES else [],
        "names_fit": sum(map(len, classes)) <= MOST_LETTERS,
    }


def _hospitals(facts: Facts) -> dict[str, Any]:
    rows = []
    for number in range(facts.summary["num_clients"]):
        statement = facts.charges.get("clients", {}).get(str(number), {})
        answered = sum(number in r["answered"] for r in facts.requests)
        refused = sum(str(number) in r["refused"] for r in facts.requests)
        stated = ", ".join(f"{name} {n:,}" for name, n in statement.get("charged", {}).items())
        remarks = [facts.absent[number]] if facts.absent.get(number) == NEVER else []
        if lost := sum(statement.get("forgotten", {}).values()):
            lost_text = counted(lost, "release")
            remarks.append(f"its ledger lost {lost_text}: an older state was restored")
        if changed := statement.get("changed"):
            remarks.append(f"its records changed {counted(changed, 'time')}")
        rows.append(
            (facts.hospitals[number], answered, answered + refused, stated, "; ".join(remarks))
        )
    seen: dict[tuple[int, str], list[str]] = {}
    for request in facts.requests:
        for key, given in request["refused"].items():
            number = int(key)
            reason = NEVER if facts.absent.get(number) == NEVER else given
            seen.setdefault((number, reason), []).append(_request_time(request))
    return {
        "hospitals_of": rows,
        "never": NEVER,
        "faults": [
            [facts.hospitals[n], reason, len(when), when[0], when[-1] if len(when) > 1 else "-"]
            for (n, reason), when in sorted(seen.items())
        ],
        "repeated": len(facts.requests) - len({(r["kind"], r["query_id"]) for r in facts.requests}),
    }


def _request_time(request: Mapping[str, Any]) -> str:
    kind = request["kind"]
    where = REQUESTS.get(kind, kind)
    if kind in ("answers", "train", "gradients"):
        where = f"round {request['query_id']}"
    return f"{where}, {request['at'].replace('T', ' ').removesuffix('Z')}"


# --- the page of a sweep ---


def sweep_page(
    name: str,
    settings: Sequence[Setting],
    rounds: Mapping[str, Sequence[Row]],
    differences: Sequence[Sequence[str]] = (),
    unfinished: Sequence[Unfinished] = (),
    own_title: str = "",
) -> str:
    """Return the page of a sweep, with the reader's title or, for "", a description."""
    compared = list(zip(settings, setting_names(settings), strict=True))
    ranked = [each for each in compared if not math.isnan(each[0].score("student")[0])]
    ranked.sort(key=lambda each: -each[0].score("student")[0])
    experiments = dict.fromkeys(s.values.get("experiment", "") for s in settings)
    ours = [name for name in experiments if name in files_of("experiment")]
    return _render(
        "sweep.html.j2",
        name=name,
        own_title=own_title,
        compared=compared,
        data=dict.fromkeys(setting.values["data"] for setting in settings),
        experiment=next(iter(ours), ""),
        runs=sum(len(setting.runs) for setting in settings),
        best=next(iter(ranked), None),
        best_proven=next((each for each in ranked if _is_meaningful(each[0])), None),
        unfinished=unfinished,
        contents=contents_notes(settings),
        seeded=any("seeded noise" in s.caveats and s.epsilon(RECORD) < math.inf for s in settings),
        ensembles=any(not math.isnan(s.score("ensemble")[0]) for s in settings),
        record=RECORD,
        replaced=REPLACED,
        claims=CLAIMS,
        differing_columns=differing_columns(settings),
        score_names=SCORE_NAMES,
        costs_of=tables.costs_of,
        differences=differences,
        differences_note=tables.DIFFERENCES,
        main=sweep_charts.over_epsilon(settings) or sweep_charts.dots(settings),
        over_rounds=sweep_charts.over_rounds(settings, rounds, MOST_LINES),
        over_keys=sweep_charts.over_keys(settings, MOST_LINES),
        preface=tables.preface(settings),
        origin_of=tables.origin(settings),
    )


def _is_meaningful(setting: Setting) -> bool:
    deltas = [float(run["delta"]) for run in setting.runs]
    return setting.epsilon(RECORD) <= MEANINGFUL and max(deltas) <= MEANINGFUL_DELTA
