"""The files of `fed-dpsd report`: tables, figures, and pages from templates/."""

import base64
import functools
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from fed_dpsd.report import charts, figures, guarantee, numbers, tables
from fed_dpsd.report.charts import Bars, Chart
from fed_dpsd.report.facts import Facts, Unfinished
from fed_dpsd.report.guarantee import MEANINGFUL, MEANINGFUL_DELTA
from fed_dpsd.report.numbers import counted, percent, rounded_up, size, spread, with_interval
from fed_dpsd.report.settings import (
    ACCURACIES,
    CLAIMS,
    GRID,
    LABEL,
    LABEL_LEGEND,
    REASON,
    SCORES,
    Row,
    Setting,
    apart,
    beside,
    names,
    read,
)
from fed_dpsd.report.tables import FIRST_LINE, SUMMARY_START, Table, write_own

TEMPLATES = Path(__file__).with_name("templates")
UNFINISHED = "results.html"  # the page of the completed run has the same name
RECORD, REPLACED = CLAIMS[:2]
MOST_CLIENTS = 50  # rows of a table
MOST_CLASSES = 20  # of a matrix
MOST_PAIRS = 10  # most frequent confusions
MOST_LETTERS = 40  # of all class names as columns of a matrix on paper
MOST_SHADE = 0.55  # numbers on a darker cell are hard to read
MOST_LINES = 8  # settings in one chart
PICTURES = 6
ACROSS, DOWN = 8, 3  # images that a picture shows of the run's own
LARGEST_IMAGE = 48  # pixels; larger ones are scaled down
SCORE_NAMES = {
    "student": "student",
    "ensemble": "ensemble of all teachers",
    "weighted_ensemble": "ensemble, weighted by class counts",
    "client_best": "best client alone",
    "client_mean": "mean of clients alone",
}
REQUESTS = {
    "answers": "images",
    "counts": "class counts",
    "weights": "weights",
    "baseline": "weights",
    "train": "a training",
}

Pairs = list[tuple[str, str]]


def write_unfinished(run: Facts, folder: Path) -> Path:
    """Write the page of a run that has not completed, where the completed run's page will be.

    Raises:
        UserError: the report did not write the existing file, or it cannot be written.
    """
    return write_own(folder / UNFINISHED, run_page(run))


def write(
    paths: Sequence[Path],
    folder: Path,
    against: str | None = None,
    run: Facts | None = None,
    unfinished: Sequence[Unfinished] = (),
) -> Iterator[Path]:
    """Write the files, named after the first table, and yield each path.

    Args:
        paths: tables of `fed-dpsd sweep`; files next to them are read if they exist.
        folder: folder to write to.
        against: name of a setting with which the others are compared, seed by seed.
        run: the run of the table, if it is of a single run; None for a sweep.
        unfinished: runs of the sweep that have not completed, which its page names.

    Raises:
        UserError: a file cannot be read or written, the report did not write the existing file, or
            no setting is named `against`.
    """
    settings, stem = read(paths), paths[0].stem
    differences = tables.differences(settings, against) if against else []
    rounds = beside(paths, "rounds", charts.ROUND_COLUMNS)
    pairs = beside(paths, "confusion", figures.PAIR_COLUMNS)
    over_rounds = [chart for _, drawn in charts.over_rounds(settings, rounds) for chart in drawn]
    over_alpha = [chart for _, drawn in charts.over_alpha(settings) for chart in drawn]
    drawn = {
        stem: _wide(charts.over_epsilon(settings)),
        f"{stem}_settings": _wide(charts.bars([s for s in settings if GRID in s.values])),
        f"{stem}_progress": _wide(over_rounds, across=2),
        f"{stem}_alpha": _wide(over_alpha),
        f"{stem}_confusion": figures.draw_confusions(settings, pairs),
    }
    yield write_own(folder / f"{stem}.md", tables.markdown(settings, differences))
    yield write_own(folder / f"{stem}_summary.csv", tables.summary(settings), SUMMARY_START)
    for name, figure in drawn.items():
        if figure:
            yield figures.save(figure, folder / f"{name}.png")
            yield figures.save(figure, folder / f"{name}.pdf")
    page = (
        run_page(run) if run else sweep_page(stem, settings, rounds, pairs, differences, unfinished)
    )
    yield write_own(folder / f"{stem}.html", page)


def _wide(drawn: Sequence[Any], across: int = 1) -> Any:
    if not drawn:
        return None
    if isinstance(drawn[0], Bars):
        return figures.draw_bars(drawn, wide=True)
    return figures.draw(drawn, across=across)


# --- templates ---


def _prose(value: object) -> object:
    """Return plain text as HTML: `code` in backticks, and numbers that stay on one line."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    text = re.sub(r"\b(\de-\d+)\b", r'<span class="whole">\1</span>', str(escape(value)))
    text = re.sub(r"(\d) %", "\\1\u00a0%", text)
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", text))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_prose,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "percent": percent,
        "percent_at_most": numbers.percent_at_most,
        "rounded_up": rounded_up,
        "short_number": "{:g}".format,
        "capitalised": lambda text: f"{text[:1].upper()}{text[1:]}",
    }
    environment.tests["finite"] = math.isfinite
    environment.globals |= {"first_line": Markup(FIRST_LINE), "counted": counted}
    return environment


def _render(template: str, **content: Any) -> str:
    return _environment().get_template(template).render(content)


def _figures(drawn: Sequence[Chart | Bars]) -> list[dict[str, Any]]:
    """Return charts as a page shows them: narrow SVG with its text and its table of numbers."""
    shown = []
    for chart in drawn:
        one = isinstance(chart, Bars)
        figure = figures.draw_bars([chart]) if one else figures.draw([chart])
        box, svg = figures.to_svg(figure, chart.name)
        about = {"name": chart.name, "title": chart.title, "text": chart.text}
        shown.append({**about, "box": box, "svg": Markup(svg), "numbers": chart.numbers()})
    return shown


# --- the page of a run ---


def run_page(facts: Facts) -> str:
    """Return the page of a run or of a deployment."""
    summary, kind = facts.summary, "run" if facts.simulated else "deployment"
    row, counts = facts.row("record", "add_remove"), facts.right_and_all
    title = f"{summary['method']} on {summary['data']}: a {kind} with "
    title += counted(summary["num_clients"], facts.clients)
    title += ", not finished" * bool(facts.unfinished)
    low, high = numbers.wilson(*counts) if counts else (0.0, 1.0)
    finite = math.isfinite(float(row["epsilon"]))
    claims, infinite = guarantee.claims(facts.card)
    times = charts.response_times(facts)
    return _render(
        "run.html.j2",
        title=title,
        kind=f"Report of one {kind} of FedDPSD · {facts.name} · seed {summary['seed']}",
        run=kind,
        facts=facts,
        counts=counts,
        interval=f"{100 * low:.1f} to {100 * high:.1f}",
        short=guarantee.short,
        review=guarantee.review,
        spent=guarantee.spent(facts) if facts.unfinished else "",
        attacker=guarantee.ATTACKERS[row["trust"]],
        trusted=guarantee.TRUST[row["trust"]],
        right=guarantee.right_at_most(row) if finite else 1.0,
        found=guarantee.found_at_most(row) if facts.meaningful else 1.0,
        false_alarms=guarantee.FALSE_ALARMS,
        most_epsilon=MEANINGFUL,
        claims=claims,
        infinite=infinite,
        notes=guarantee.notes(facts.card),
        not_covered=guarantee.not_covered(facts),
        over_rounds=_figures(charts.of_rounds(facts)),
        pictures=_pictures(facts),
        payload=_payload(facts),
        times=_times(facts),
        settings=_settings(facts),
        versions=_versions(facts),
        most_clients=MOST_CLIENTS,
        response_times=_figures([times] if times else []),
        **_classes(facts),
        **(_clients(facts) if facts.simulated else _hospitals(facts)),
    )


def _pictures(facts: Facts) -> list[tuple[int, str, float | None]]:
    """Return the number, the PNG in base64 and the agreement of some rounds, first to last."""
    rounds, agreement = (
        sorted(facts.samples),
        {r["round"]: r.get("agreement") for r in facts.rounds},
    )
    some = {
        rounds[round(i * (len(rounds) - 1) / (PICTURES - 1))] for i in range(PICTURES) if rounds
    }
    return [
        (number, base64.b64encode(first_of(facts.samples[number])).decode(), agreement.get(number))
        for number in sorted(some)
    ]


def first_of(path: Path) -> bytes:
    """Return a PNG of the first rows of a run's picture of images, small enough for a page."""
    with Image.open(path) as whole:
        tile = (whole.width - 2) / ACROSS  # each image has a margin of two pixels
        rows = min(DOWN, max(1, round((whole.height - 2) / tile)))
        part = whole.convert("RGB").crop((0, 0, whole.width, round(rows * tile) + 2))
    if tile > LARGEST_IMAGE + 2:
        scale = LARGEST_IMAGE / tile
        part = part.resize((round(part.width * scale), round(part.height * scale)))
    if part.getextrema()[0] == part.getextrema()[1] == part.getextrema()[2]:
        part = part.convert("L")
    content = io.BytesIO()
    part.save(content, "PNG", optimize=True)
    return content.getvalue()


def _classes(facts: Facts) -> dict[str, Any]:
    """Return the tables of the classes, their confusions, and the calibration."""
    counts, classes = facts.summary["confusion"], facts.classes
    parts = facts.summary["calibration"]
    if not counts:
        return {"by_class": None}
    of_all, rows = range(len(classes)), []
    for k, name in enumerate(classes):
        images, named = sum(counts[k]), sum(row[k] for row in counts)
        wrong = max((c for c in of_all if c != k), key=lambda c: counts[k][c], default=k)
        mistaken = counts[k][wrong] if wrong != k else 0
        rows.append(
            [
                *(name, f"{images:,}", with_interval(counts[k][k], images)),
                with_interval(counts[k][k], named),
                f"{classes[wrong]} ({mistaken:,})" if mistaken else "-",
            ]
        )
    by_class = Table(
        "Each class on the test images, with 95 % intervals (Wilson). Sensitivity: the fraction of "
        "the images of a class that are classified as it. Precision: the fraction of the images "
        "classified as a class that are of it.",
        ["class", "images", "sensitivity", "precision", "most often taken for (images)"],
        rows,
    )
    wrong_pairs = [(counts[k][c], k, c) for k in of_all for c in of_all if k != c and counts[k][c]]
    wrong_pairs.sort(key=lambda pair: -pair[0])
    confused = [[classes[k], classes[c], f"{n:,}"] for n, k, c in wrong_pairs[:MOST_PAIRS]]
    title = f"The {len(confused)} most frequent confusions on the test images"
    short = sum(map(len, classes)) <= MOST_LETTERS
    matrix = {
        "header": classes if short else [str(k) for k in of_all],
        "rows": [
            (
                name if short else f"{k}: {name}",
                [
                    (n, MOST_SHADE * n / (sum(counts[k]) or 1), f"{name} taken for {other}: {n:,}")
                    for n, other in zip(counts[k], classes, strict=True)
                ],
            )
            for k, name in enumerate(classes)
        ],
    }
    bins = (
        list(zip(*(parts[k] for k in ("confidence", "accuracy", "count")), strict=True))
        if parts
        else []
    )
    return {
        "by_class": by_class,
        "matrix": matrix if len(counts) <= MOST_CLASSES else None,
        "confused": Table(title, ["true class", "taken for", "images"], confused),
        "overconfident": sum((sure - right) * n for sure, right, n in bins if n) > 0,
        "calibration": _figures([charts.calibration(parts)] if parts else []),
    }


def _clients(facts: Facts) -> dict[str, Any]:
    """Return the table of the simulated clients."""
    summary = facts.summary
    accuracies, areas = (summary[metric]["clients"] or [] for metric in ("accuracy", "auroc"))
    refused: dict[int, int] = {}
    for line in facts.rounds:
        for client in line["refused"]:
            refused[int(client)] = refused.get(int(client), 0) + 1
    scored, kept = (
        bool(accuracies),
        bool(facts.ledgers),
    )  # scores that no epsilon covers are not here
    header = ["client", *(["own teachers' accuracy", "own teachers' AUROC"] * scored)[: 2 * scored]]
    header += ["epsilon spent", *(["its ledger, over its life (record, add_remove)"] * kept)]
    rows = []
    for number in range(min(summary["num_clients"], MOST_CLIENTS)):
        spent = facts.costs.get(number)
        area = areas[number] if number < len(areas) else None
        accuracy = accuracies[number] if number < len(accuracies) else None
        scores = [percent(accuracy), "unknown" if area is None else f"{area:.3f}"]
        rows.append(
            [
                *(f"client {number}", *(scores if scored else [])),
                "unknown" if spent is None else rounded_up(spent),
                *([facts.ledgers.get(number, "unknown")] if kept else []),
                f"{refused.get(number, 0):,}",
            ]
        )
    row = facts.row("record", "add_remove")
    caption = "Each client: "
    caption += (
        "the mean of its own teachers on the test images, measured without noise, and " * scored
    )
    caption += (
        "the epsilon that the run has cost it (record, add_remove, trust "
        f"{row['trust']}, delta {row['delta']:g}{guarantee.review(row)})."
    )
    caption += " The ledger is shared: it has the charges of all runs that use it." * kept
    known = [each for each in accuracies if each is not None]
    many = summary["num_clients"] > MOST_CLIENTS and known
    return {
        "each_client": Table(caption, [*header, "refused rounds"], rows),
        "spread": (min(known), max(known)) if many else None,
    }


def _hospitals(facts: Facts) -> dict[str, Any]:
    """Return the table of the hospitals, the faults that were seen, and the repeated requests."""
    rows = []
    for number in range(facts.summary["num_clients"]):
        statement = facts.charges.get("clients", {}).get(str(number), {})
        sent = [r for r in facts.requests if number in r["answered"] or str(number) in r["refused"]]
        answered = sum(number in request["answered"] for request in sent)
        stated = ", ".join(f"{name} {n:,}" for name, n in statement.get("charged", {}).items())
        spent = facts.costs.get(number)
        remarks = []
        if lost := sum(statement.get("forgotten", {}).values()):
            text = f"its ledger lost {counted(lost, 'release')}: an older state was restored"
            remarks.append(text)
        if changed := statement.get("changed"):
            remarks.append(f"its records changed {counted(changed, 'time')}")
        rows.append(
            [
                *(f"hospital {number}", f"{answered:,} of {len(sent):,}"),
                *(stated or "nothing stated", "unknown" if spent is None else rounded_up(spent)),
                *(facts.ledgers.get(number) or "kept there", "; ".join(remarks) or "-"),
            ]
        )
    row = facts.row("record", "add_remove")
    totals = Table(
        f"Each hospital. Epsilon spent: (record, add_remove), trust {row['trust']}, delta "
        f"{row['delta']:g}{guarantee.review(row)}, proven for the releases that the hospital "
        "stated.",
        [
            *("hospital", "requests answered", "releases stated, by mechanism"),
            "epsilon spent (record, add_remove)",
            *("its ledger, over its life (record, add_remove)", "remarks"),
        ],
        rows,
    )
    seen: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for request in facts.requests:
        for number, reason in request["refused"].items():
            seen.setdefault((number, reason), []).append(request)
    faults = [
        [
            *(f"hospital {number}", reason, f"{len(when):,}"),
            *(_when(when[0]), _when(when[-1]) if len(when) > 1 else "-"),
        ]
        for (number, reason), when in sorted(seen.items(), key=lambda item: int(item[0][0]))
    ]
    return {
        "totals": totals,
        "faults": Table(
            "Requests that a hospital did not answer; the round continued without it. Times are "
            "UTC.",
            ["hospital", "what happened", "times", "first", "last"],
            faults,
        ),
        "repeated": len(facts.requests) - len({(r["kind"], r["query_id"]) for r in facts.requests}),
    }


def _when(request: Mapping[str, Any]) -> str:
    kind = REQUESTS.get(request["kind"], request["kind"])
    where = f"round {request['query_id']}" if request["kind"] in ("answers", "train") else kind
    return f"{where}, {request['at'].replace('T', ' ').removesuffix('Z')}"


def _payload(facts: Facts) -> Table:
    queries, clients = facts.summary["queries"], facts.summary["num_clients"]
    images = facts.rounds[-1]["answered_queries"] if facts.rounds else 0
    each = images * (facts.settings.get("clients_per_round") or clients) * facts.answers_images
    header = ["direction", "in all", f"for each {facts.clients}"]
    header += [f"for each image and queried {facts.clients}"] * bool(each)
    sent, received = queries["bytes_to_clients"], queries["bytes_to_server"]
    rows = [
        [text, size(count), size(count / clients), *([size(count / each)] if each else [])]
        for text, count in (
            (f"requests, server to {facts.clients}s", sent),
            (f"responses, {facts.clients}s to server", received),
        )
    ]
    return Table("Payload of all rounds, without the overhead of the transport.", header, rows)


def _times(facts: Facts) -> Pairs:
    queries, seconds = facts.summary["queries"], facts.summary["seconds"]
    worked = seconds["teachers"] + seconds["rounds"]  # the total is of the last process alone
    teachers = ("of it, teachers and diagnostics", numbers.duration(seconds["teachers"]))
    return [
        ("time in all, without pauses", numbers.duration(max(seconds["total"], worked))),
        *([teachers] if facts.simulated else []),
        ("of it, rounds", numbers.duration(seconds["rounds"])),
        ("teachers' answers", f"{queries['forward_answers']:,} (images times teachers)"),
        ("of them, with a gradient", f"{queries['backward_answers']:,}"),
    ]


def _settings(facts: Facts) -> list[Pairs]:
    """Return the settings that name no path, those of the run before those of its parts."""
    groups: dict[str, Pairs] = {"": []}
    for key, value in facts.settings.items():
        text = value if isinstance(value, str) else json.dumps(value)
        groups.setdefault(key.rpartition(".")[0], []).append((f"`{key}`", f"`{text}`"))
    return list(groups.values())


def _versions(facts: Facts) -> Pairs:
    rows = [(f"`{name}`", str(version)) for name, version in facts.versions.items() if version]
    digest = facts.summary["student_sha256"]
    return [*rows, *([("SHA-256 of the student", f"`{digest}`")] if digest else [])]


# --- the page of a sweep ---


def sweep_page(
    name: str,
    settings: Sequence[Setting],
    rounds: Mapping[str, Sequence[Row]],
    pairs: Mapping[str, Sequence[Row]],
    differences: Sequence[Sequence[str]] = (),
    unfinished: Sequence[Unfinished] = (),
) -> str:
    """Return the page of a sweep.

    Args:
        name: the table's name.
        settings: what to compare.
        rounds: rows of each run's rounds, by the run's key.
        pairs: rows of each run's confusions, by the run's key.
        differences: header and rows of paired differences; () for none.
        unfinished: runs of the sweep that have not completed, and are in none of the numbers.
    """
    data = ", ".join(dict.fromkeys(setting.values["data"] for setting in settings))
    experiment = next((s.values["experiment"] for s in settings if "experiment" in s.values), "")
    runs = sum(len(setting.runs) for setting in settings)
    kind = f"Report of a sweep of FedDPSD · {name} · {counted(runs, 'run')}"
    labels = names(settings)
    keys = [
        [
            run["key"],
            label,
            run["seed"],
            percent(float(run["student"])) if run.get("student") else "-",
        ]
        for setting, label in zip(settings, labels, strict=True)
        for run in setting.runs
    ]
    return _render(
        "sweep.html.j2",
        title=f"{counted(len(settings), 'setting')} compared on {data}",
        kind=kind + (f" · experiment {experiment}" if experiment else ""),
        result=_result(settings),
        unfinished=unfinished,
        seeded=any(
            "seeded noise" in s.caveats and not math.isinf(s.epsilon(RECORD)) for s in settings
        ),
        main=_figures(charts.over_epsilon(settings) or charts.bars(settings)),
        few_columns=_few_columns(settings),
        paired=Table(tables.DIFFERENCES, differences[0], differences[1:]) if differences else None,
        over_rounds=_noted(charts.over_rounds(settings, rounds, MOST_LINES)),
        over_alpha=_noted(charts.over_alpha(settings, MOST_LINES)),
        by_class=_by_class(settings, pairs),
        details_of=[
            _details(s, label, apart(settings)) for s, label in zip(settings, labels, strict=True)
        ],
        preface=tables.preface(settings),
        experiment=experiment,
        runs=Table(
            "Runs, by the name of their folder", ["key", "setting", "seed", "student"], keys
        ),
        origin_text=tables.origin(settings),
    )


def _noted(found: Iterator[tuple[str, list[Chart]]]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(note, _figures(drawn)) for note, drawn in found]


def _result(settings: Sequence[Setting]) -> str:
    """Return the best student, and the best one with a meaningful epsilon, in sentences."""
    labels = dict(zip(map(id, settings), names(settings), strict=True))
    scored = [s for s in settings if not math.isnan(s.score("student")[0])]
    if not scored:
        return "No setting has a student whose accuracy is known."

    def described(setting: Setting) -> str:
        epsilon, review = setting.epsilon(RECORD), _review(setting)
        claim = (
            "nothing proven about a record"
            if math.isinf(epsilon)
            else f"epsilon {rounded_up(epsilon)} (record, add_remove, trust "
            f"{setting.all_of('trust')}, delta {setting.all_of('delta')}{review})"
        )
        return f"{_score(setting)} % ({labels[id(setting)]}), with {claim}."

    best = max(scored, key=lambda s: s.score("student")[0])
    text = f"Best student: {described(best)}"
    proven = [s for s in scored if _is_meaningful(s)]
    if not proven:
        return f"{text} No setting has a proven epsilon of {MEANINGFUL:g} or less for a record."
    if best in proven:
        return text
    other = max(proven, key=lambda s: s.score("student")[0])
    return f"{text} Best with a proven epsilon of at most {MEANINGFUL:g}: {described(other)}"


def _is_meaningful(setting: Setting) -> bool:
    deltas = [float(run["delta"]) for run in setting.runs]
    return setting.epsilon(RECORD) <= MEANINGFUL and max(deltas) <= MEANINGFUL_DELTA


def _review(setting: Setting) -> str:
    return f", {setting.review}" if setting.review else ""


def _score(setting: Setting, score: str = "student") -> str:
    return spread(*setting.score(score)).replace(" ± ", "\u00a0±\u00a0")


def _few_columns(settings: Sequence[Setting]) -> Table:
    """Return the main table; delta and trust are in its caption if all settings share them."""
    legends = [f"{s.all_of('trust')}, {s.all_of('delta')}" for s in settings]
    own = len(set(legends)) > 1
    ensembles = any(not math.isnan(s.score("ensemble")[0]) for s in settings)
    header = ["setting", "student, %", *(["ensemble, %"] * ensembles)]
    header += ["epsilon, record added or removed", "epsilon, record replaced"]
    header += [*(["trust, delta"] * own), "seeds"]
    rows = []
    for setting, name, legend in zip(settings, names(settings), legends, strict=True):
        row = [name, _score(setting), *([_score(setting, "ensemble")] * ensembles)]
        row += [rounded_up(setting.epsilon(c)) + _review(setting) for c in (RECORD, REPLACED)]
        rows.append([*row, *([legend] * own), str(len(setting.runs))])
    trust, delta = settings[0].all_of("trust"), settings[0].all_of("delta")
    caption = (
        "Mean and standard deviation over seeds, on the test images after the last round. Epsilons "
        f"are proven, for one run{'' if own else f', trust {trust}, delta {delta}'}; inf: nothing "
        "is proven."
    )
    return Table(caption, header, rows)


def _by_class(settings: Sequence[Setting], pairs: Mapping[str, Sequence[Row]]) -> list[Table]:
    """Return a table of each class's accuracy for each data set; all seeds together."""
    known = [s for s in settings if any(run["key"] in pairs for run in s.runs)]
    found = []
    for title, group in charts.by_data(known).items():
        rows = []
        for setting, name in zip(group, names(group), strict=True):
            counts = figures.confusions(setting, pairs)
            right = zip(counts.diagonal(), counts.sum(1), strict=True)
            rows.append([name, *(f"{100 * n / total:.0f}" if total else "-" for n, total in right)])
        header = ["setting", *map(str, range(int(group[0].values["num_classes"])))]
        caption = f"Accuracy of each class, %, all seeds together: {title}"
        found.append(Table(caption, header, rows, wide=True))
    return found


def _details(setting: Setting, name: str, columns: Sequence[str]) -> tuple[str, Pairs]:
    """Return a title and everything else that is known about a setting."""
    values = setting.values
    facts = [(f"`{column}`", f"`{values[column]}`") for column in columns if column in values]
    for score in SCORES if values["num_classes"] == "2" else ACCURACIES:
        if not math.isnan(setting.score(score)[0]):
            model = score.removeprefix("auroc_")
            metric = "accuracy" if model == score else "AUROC"
            facts.append((f"{SCORE_NAMES[model]}, {metric}, %", _score(setting, score)))
    facts += [(title, text) for title, text in tables.costs_of(setting).items() if text]
    legend = f"trust {setting.all_of('trust')}, delta {setting.all_of('delta')}"
    for claim in CLAIMS:
        unit, relation = claim.split("_", 1)
        number = rounded_up(setting.epsilon(claim), 5) + _review(setting)
        facts.append((f"epsilon proven ({unit}, {relation})", f"{number}; {legend}"))
    if known := [float(run[LABEL]) for run in setting.runs if run.get(LABEL)]:
        own = ", ".join(setting.all_of(column) for column in LABEL_LEGEND)
        text = f"{rounded_up(max(known), 5)}; delta, trust: {own}; it protects no image"
        facts.append(("epsilon of labels alone (label, replace_one)", text))
    if published := setting.all_of("epsilon_published"):
        text = "nothing" if published == "inf" else f"{published}; it guarantees nothing"
        facts.append(("published by the papers' formulas", text))
    if reason := setting.all_of(REASON):
        facts.append(("why an epsilon is inf", reason))
    if setting.caveats:
        facts.append(("caveats", "; ".join(setting.caveats)))
    facts.append(("seeds", ", ".join(run["seed"] for run in setting.runs)))
    score = _score(setting)
    return f"{name}: {'no student' if score == '-' else f'{score} %'}", facts
