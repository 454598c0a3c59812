"""The page of a sweep: a chart that compares the settings, few columns, and details on demand."""

import math
from collections.abc import Iterator, Mapping, Sequence

from fed_dpsd.report import paired, sweep_charts
from fed_dpsd.report.document import Section, document
from fed_dpsd.report.facts import Unfinished
from fed_dpsd.report.guarantee import MEANINGFUL, MEANINGFUL_DELTA
from fed_dpsd.report.markup import (
    Content,
    Html,
    element,
    folded,
    html,
    listed,
    paragraphs,
    table,
    terms,
)
from fed_dpsd.report.numbers import counted, rounded_up
from fed_dpsd.report.settings import (
    ACCURACIES,
    CLAIMS,
    LABEL,
    LABEL_LEGEND,
    REASON,
    SCORES,
    Row,
    Setting,
    apart,
    names,
)
from fed_dpsd.report.table import costs_of, origin, preface

RECORD, REPLACED = CLAIMS[:2]
SEEDED = (
    "Simulations: their noise follows from public seeds, so their own files carry no guarantee. "
    "The epsilons are those of the same runs with secret noise."
)
WORDS = {
    "student": "student",
    "ensemble": "ensemble of all teachers",
    "weighted_ensemble": "ensemble, weighted by class counts",
    "client_best": "best client alone",
    "client_mean": "mean of clients alone",
}


def page(
    name: str,
    settings: Sequence[Setting],
    rounds: Mapping[str, Sequence[Row]],
    pairs: Mapping[str, Sequence[Row]],
    differences: Sequence[Sequence[str]] = (),
    unfinished: Sequence[Unfinished] = (),
) -> str:
    """Return the page's text.

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
    title = f"{counted(len(settings), 'setting')} compared on {data}"
    runs = sum(len(setting.runs) for setting in settings)
    kind = f"Report of a sweep of FedDPSD · {name} · {counted(runs, 'run')}"
    kind += f" · experiment {experiment}" if experiment else ""
    sections = [
        Section("settings", "The settings", _few_columns(settings)),
        Section("differences", "Differences, seed by seed", _differences(differences)),
        Section("rounds", "Over the rounds", sweep_charts.over_rounds(settings, rounds)),
        Section("alpha", "How much clients differ", sweep_charts.over_alpha(settings)),
        Section("classes", "Class by class", _folded_tables(settings, pairs)),
        Section("details", "Details of each setting", _details(settings)),
        Section("meaning", "What the numbers mean, and leave out", _meaning(settings)),
        Section("repeat", "How to repeat it", _repeat(settings, experiment)),
    ]
    lead = [element("p", _result(settings), class_="lead"), *_warnings(settings, unfinished)]
    lead += sweep_charts.main(settings)
    return document(title, kind, html(lead), sections, [origin(settings)])


# --- the result ---


def _result(settings: Sequence[Setting]) -> str:
    """Return the result in a sentence or two: the best student, and the best that is protected."""
    labels = dict(zip(map(id, settings), names(settings), strict=True))
    scored = [s for s in settings if not math.isnan(s.score("student")[0])]
    if not scored:
        return "No setting has a student whose accuracy is known."
    best = max(scored, key=lambda s: s.score("student")[0])
    said = f"Best student: {_score(best)} % ({labels[id(best)]}), with {_claim(best)}."
    proven = [s for s in scored if _is_meaningful(s)]
    if not proven:
        return f"{said} No setting has a proven epsilon of {MEANINGFUL:g} or less for a record."
    if best in proven:
        return said
    other = max(proven, key=lambda s: s.score("student")[0])
    return (
        f"{said} Best with a proven epsilon of at most {MEANINGFUL:g}: {_score(other)} % "
        f"({labels[id(other)]}), with {_claim(other)}."
    )


def _warnings(settings: Sequence[Setting], unfinished: Sequence[Unfinished]) -> Iterator[Html]:
    """Yield what a reader of the first sentences has to know besides."""
    if unfinished:
        runs = f"{counted(len(unfinished), 'run')} {'is' if len(unfinished) == 1 else 'are'}"
        said = (
            f"Not complete: {runs} in none of these numbers. The sweep's command goes on with what "
            "has stopped, and skips what is finished."
        )
        each = listed(f"`{run.name}`: {run.told}" for run in unfinished)
        yield element("div", paragraphs(said), each, class_="note")
    if any("seeded noise" in s.caveats and not math.isinf(s.epsilon(RECORD)) for s in settings):
        yield element("div", paragraphs(SEEDED), class_="note")


def _is_meaningful(setting: Setting) -> bool:
    deltas = [float(run["delta"]) for run in setting.runs]
    return setting.epsilon(RECORD) <= MEANINGFUL and max(deltas) <= MEANINGFUL_DELTA


def _claim(setting: Setting) -> str:
    epsilon = setting.epsilon(RECORD)
    if math.isinf(epsilon):
        return "nothing proven of a record"
    return (
        f"epsilon {rounded_up(epsilon)} (record, add_remove, trust {setting.all_of('trust')}, "
        f"delta {setting.all_of('delta')}{_unreviewed(setting)})"
    )


def _unreviewed(setting: Setting) -> str:
    return f", {setting.review}" if setting.review else ""


def _score(setting: Setting, score: str = "student") -> str:
    mean, deviation = setting.score(score)
    if math.isnan(mean):
        return "-"
    return f"{mean:.1f}" if math.isnan(deviation) else f"{mean:.1f}\u00a0±\u00a0{deviation:.1f}"


# --- tables ---


def _few_columns(settings: Sequence[Setting]) -> Iterator[Html]:
    """Yield the main table; delta and trust stand once above it, if all have the same."""
    legends = {(s.all_of("trust"), s.all_of("delta")) for s in settings}
    own = len(legends) > 1
    ensembles = any(not math.isnan(s.score("ensemble")[0]) for s in settings)
    header = ["setting", "student, %", *(["ensemble, %"] if ensembles else [])]
    header += ["epsilon, record added or removed", "epsilon, record replaced"]
    header += [*(["trust, delta"] if own else []), "seeds"]
    rows = []
    for setting, name in zip(settings, names(settings), strict=True):
        row: list[Content] = [name, _score(setting)]
        row += [_score(setting, "ensemble")] if ensembles else []
        for claim in (RECORD, REPLACED):
            row.append(rounded_up(setting.epsilon(claim)) + _unreviewed(setting))
        legend = f"{setting.all_of('trust')}, {setting.all_of('delta')}"
        row += [*([legend] if own else []), str(len(setting.runs))]
        rows.append(row)
    meaning = "" if own else f", trust {settings[0].all_of('trust')}, "
    meaning += "" if own else f"delta {settings[0].all_of('delta')}"
    yield table(
        "Mean and standard deviation over seeds, on the test images after the last round. Epsilons "
        f"are proven, for one run{meaning}; inf: nothing is proven.",
        header,
        rows,
    )


def _differences(differences: Sequence[Sequence[str]]) -> Iterator[Html]:
    if differences:
        header, *rows = differences
        yield table(paired.EXPLANATION, header, rows)


def _folded_tables(
    settings: Sequence[Setting], pairs: Mapping[str, Sequence[Row]]
) -> Iterator[Html]:
    if found := list(sweep_charts.by_class(settings, pairs)):
        yield folded("Accuracy of each class", found)


def _details(settings: Sequence[Setting]) -> Iterator[Html]:
    """Yield everything else that is known of each setting, folded."""
    columns = apart(settings)
    for setting, name in zip(settings, names(settings), strict=True):
        facts: list[tuple[Content, Content]] = [
            (f"`{column}`", f"`{setting.values[column]}`")
            for column in columns
            if column in setting.values
        ]
        scores = SCORES if setting.values["num_classes"] == "2" else ACCURACIES
        for score in scores:
            if not math.isnan(setting.score(score)[0]):
                area = score.removeprefix("auroc_")
                words = f"{WORDS[area]}, {'accuracy' if area == score else 'AUROC'}, %"
                facts.append((words, _score(setting, score)))
        facts += [(title, text) for title, text in costs_of(setting).items() if text]
        legend = f"trust {setting.all_of('trust')}, delta {setting.all_of('delta')}"
        for claim in CLAIMS:
            unit, relation = claim.split("_", 1)
            number = rounded_up(setting.epsilon(claim), 5) + _unreviewed(setting)
            facts.append((f"epsilon proven ({unit}, {relation})", f"{number}; {legend}"))
        if known := [float(run[LABEL]) for run in setting.runs if run.get(LABEL)]:
            own = ", ".join(setting.all_of(column) for column in LABEL_LEGEND)
            said = f"{rounded_up(max(known), 5)}; delta, trust: {own}; it protects no image"
            facts.append(("epsilon of labels alone (label, replace_one)", said))
        if published := setting.all_of("epsilon_published"):
            said = "nothing" if published == "inf" else f"{published}; it guarantees nothing"
            facts.append(("published by the papers' formulas", said))
        if reason := setting.all_of(REASON):
            facts.append(("why an epsilon is inf", reason))
        if setting.caveats:
            facts.append(("caveats", "; ".join(setting.caveats)))
        facts.append(("seeds", ", ".join(run["seed"] for run in setting.runs)))
        known = not math.isnan(setting.score("student")[0])
        title = f"{name}: {_score(setting)} %" if known else f"{name}: no student"
        yield folded(title, terms(facts, class_="facts"))


def _meaning(settings: Sequence[Setting]) -> Iterator[Html]:
    yield paragraphs(
        preface(settings),
        "A proven epsilon bounds what can be learned of one record from a run, by anybody whom its "
        "trust does not name: who guesses whether a fair coin put it there is right in at most "
        "74 % of cases at 1, 96 % at 3, and practically all at 10, with a small delta. The best "
        "settings above are the best on these test images, so on others they may do worse; "
        "choosing a setting by runs on the same data costs privacy that is not counted. Published "
        "numbers are those of the papers' formulas, and guarantee nothing. Accuracies of teachers "
        "and ensembles were measured without noise, and no epsilon covers them unless the training "
        "was private.",
    )


def _repeat(settings: Sequence[Setting], experiment: str) -> Iterator[Html]:
    if experiment:
        yield element("pre", element("code", f"fed-dpsd sweep experiment={experiment}"))
    yield paragraphs(
        "Each setting's own keys are in its details; those that all share are under "
        "the meaning of the numbers. One run of it has a page of its own: "
        "`fed-dpsd report` with its run folder, which bears the run's key."
    )
    rows = [
        [run["key"], name, run["seed"], _fraction(run.get("student"))]
        for setting, name in zip(settings, names(settings), strict=True)
        for run in setting.runs
    ]
    header = ["key", "setting", "seed", "student"]
    yield folded("Keys of the runs", table("Runs, by the name of their folder", header, rows))


def _fraction(text: str | None) -> str:
    return f"{100 * float(text):.1f} %" if text else "-"
