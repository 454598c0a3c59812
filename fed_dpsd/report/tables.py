"""Tables of settings as Markdown, LaTeX and CSV, and paired differences."""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fed_dpsd.accounts import words
from fed_dpsd.errors import UserError
from fed_dpsd.privacy.epsilon import rounded_up
from fed_dpsd.report.numbers import spread
from fed_dpsd.report.settings import (
    ACCURACIES,
    CLAIMS,
    GRID,
    LABEL,
    LABEL_LEGEND,
    LEGEND,
    PANEL,
    REASON,
    SCORES,
    Setting,
    differing_columns,
    group_by_data,
    name_parts,
    setting_names,
)
from fed_dpsd.storage import to_utf8, write_atomically, writing

FIRST_LINE = "<!-- Written by `fed-dpsd report`: edit the table it was made from instead. -->"
LATEX_START = "% Written by `fed-dpsd report`. It needs \\usepackage{booktabs}."
SUMMARY_START = "seeds,"
# Title, columns to sum, factor of the sum, digits after the point.
COSTS = (
    ("teacher answers", ("forward_answers", "backward_answers"), 1, 0),
    ("megabytes", ("bytes_to_clients", "bytes_to_server"), 1e-6, 2),
    ("seconds of rounds", ("seconds_rounds",), 1, 1),
)
CONFIDENCE = 0.95
LEAST_PAIRS = 3  # of an interval: two pairs make one of about 9 deviations to each side
DIFFERENCES = (
    "Differences between students, in points: the mean and standard deviation over pairs of runs "
    "with equal seeds, data, alphas and values of the keys that vary in the entry subtracted, and "
    f"the {CONFIDENCE:.0%} interval of a paired t-test if there are at least {LEAST_PAIRS} pairs."
)


def table_rows(settings: Sequence[Setting]) -> list[list[str]]:
    """Return the header and a row for each setting; the preface has the shared values."""
    columns = differing_columns(settings)
    scores = _scores(settings)
    costs = _costs(settings)
    claims = [f"epsilon {claim.replace('_', ', ', 1)}" for claim in CLAIMS]
    reasons = [setting.all_of(REASON) for setting in settings]
    why = ["why inf"] if any(reasons) else []
    labels = _labels(settings)
    lines = [[*columns, *scores, "seeds", *costs, *claims, "delta", "trust", *labels, *why]]
    for number, setting in enumerate(settings):
        row = [setting.values.get(key, "") for key in columns]
        row += [spread(*setting.score(score), unknown="") for score in scores]
        row += [str(len(setting.runs)), *(texts[number] for texts in costs.values())]
        review = f" ({setting.review})" if setting.review else ""
        row += [rounded_up(setting.epsilon(claim)) + review for claim in CLAIMS]
        row += [setting.all_of("delta"), setting.all_of("trust")]
        row += [texts[number] for texts in labels.values()]
        lines.append([*row, reasons[number]] if why else row)
    return lines


def preface(settings: Sequence[Setting]) -> str:
    """Return an explanation of the numbers, with the values shared by all rows."""
    costs = (
        "Teacher answers (images times teachers, forward and backward), megabytes (sent both ways) "
        "and seconds are means for one run. "
    )
    notes = ", ".join(dict.fromkeys(note for setting in settings for note in setting.caveats))
    caveat = f" Caveats of one row or more (record, add_remove): {notes}." if notes else ""
    if _labels(settings):
        caveat += " An epsilon of labels alone protects no image."
    if any("threshold" in setting.all_of("trust") for setting in settings):
        caveat += f" Trust threshold: against {words.against('threshold', None)}."
    return (
        "Mean ± sample standard deviation over seeds, in percent, on the held-out test split after "
        f"the last round. {costs * bool(_costs(settings))}Epsilons are proven, for one run, under "
        f"a row's delta and trust.{caveat} In all rows: "
        f"{', '.join(_shared(settings))}."
    )


def origin(settings: Sequence[Setting]) -> str:
    """Return the commits and machines that the numbers come from."""
    together = Setting({}, [run for setting in settings for run in setting.runs])
    return f"Commit {together.all_of('commit')}. Machine: {together.all_of('machine')}."


def markdown(settings: Sequence[Setting], differences: Sequence[Sequence[str]] = ()) -> str:
    """Return the page: the preface, the rows, paired differences if any, and their origin."""
    parts = [FIRST_LINE]
    if len(settings) > 1:
        parts.append(Grid.of(settings).markdown())
    parts += [wrap_paragraph(preface(settings)), markdown_table(table_rows(settings))]
    if differences:
        parts += [wrap_paragraph(DIFFERENCES), markdown_table(differences)]
    return "\n\n".join([*parts, wrap_paragraph(origin(settings))]) + "\n"


def wrap_paragraph(text: str) -> str:
    """Wrap a paragraph of a Markdown page."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a header and rows as a Markdown table."""
    header, *others = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *others])


def summary(settings: Sequence[Setting]) -> str:
    """Return the unrounded rows as CSV, with separate means and deviations, and scores in %."""
    values = dict.fromkeys(key for setting in settings for key in setting.values)
    lines = []
    for setting in settings:
        row: dict[str, Any] = {"seeds": len(setting.runs)}
        row |= {key: setting.values.get(key, "") for key in values}
        spreads = {score: setting.score(score) for score in _scores(settings)}
        spreads |= {
            title.replace(" ", "_"): setting.spread(*summed, scale=scale)
            for title, summed, scale, _ in COSTS
        }
        for name, (mean, deviation) in spreads.items():
            row |= {f"{name}_mean": mean, f"{name}_deviation": deviation}
        row |= {claim: setting.epsilon(claim) for claim in CLAIMS}
        shown = (*((LABEL, *LABEL_LEGEND) if _labels(settings) else ()), *LEGEND, REASON)
        row |= {column: setting.all_of(column) for column in shown}
        reviews = any(other.review for other in settings)
        lines.append(row | ({"review": setting.review} if reviews else {}))
    return csv_text(lines)


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with all columns of all rows; NaN is an empty cell."""
    import pandas  # takes a second to import

    frame = pandas.DataFrame(lines, dtype=object)
    return str(frame.to_csv(index=False, lineterminator="\n"))


def _shared(settings: Sequence[Setting]) -> list[str]:
    """Return `column=value` for the values that all settings share."""
    return [
        f"`{column}={text}`"
        for column, text in settings[0].values.items()
        if all(setting.values.get(column) == text for setting in settings)
    ]


def _scores(settings: Sequence[Setting]) -> list[str]:
    """Return the scores that any run has, with areas under the curve only for two classes.

    For two unbalanced classes, areas are more informative than accuracies.
    """
    shown = SCORES if any(s.values["num_classes"] == "2" for s in settings) else ACCURACIES
    return [s for s in shown if any(not math.isnan(x.score(s)[0]) for x in settings)]


def costs_of(setting: Setting) -> dict[str, str]:
    """Return a setting's mean costs by title; "" for costs that are unknown for all of its runs."""
    return {
        title: "" if math.isnan(mean) else f"{mean:,.{digits}f}"
        for title, summed, scale, digits in COSTS
        for mean, _ in [setting.spread(*summed, scale=scale)]
    }


def _costs(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Return each setting's costs by title, without costs that no setting has."""
    each = [costs_of(setting) for setting in settings]
    costs = {title: [own[title] for own in each] for title, *_ in COSTS}
    return {title: texts for title, texts in costs.items() if any(texts)}


def _labels(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Return the epsilons of labels alone, by title; empty if no run protects only labels."""
    known = [setting.label_epsilon for setting in settings]
    if not any(known):
        return {}
    title = "epsilon of labels alone, replace_one"
    legend = zip(("its delta", "its trust"), LABEL_LEGEND, strict=True)
    return {title: ["" if e is None else rounded_up(e) for e in known]} | {
        title: [s.all_of(column) for s in settings] for title, column in legend
    }


def write_own(path: Path, text: str, start: str = FIRST_LINE) -> Path:
    """Write `text`, which begins with `start`; an existing file must also begin with it."""
    with writing(path):
        own = not path.exists() or path.read_bytes().startswith(to_utf8(start))
    if not own:
        raise UserError(f"{path} was not written by `fed-dpsd report`; choose another --out")
    write_atomically(path, to_utf8(text))
    return path


# --- paired differences ---


def differences(settings: Sequence[Setting], against: str) -> list[list[str]]:
    """Return a header and the rows of other settings' scores minus the scores of `against`.

    Two runs form a pair if they have equal seeds, data, alphas and values of every key that varies
    among the settings called `against`. Pairs of several settings are not pooled. The interval is
    from a paired t-test, which assumes normal differences; there is none for fewer than
    LEAST_PAIRS pairs.

    Args:
        settings: the settings of a report.
        against: a setting, a line of settings that differ in the data or in alpha, or a grid or
            another value, as `names` writes it.
    """
    if len(settings) == 1:
        raise UserError(
            f"--against={against!r}: there is one setting, so nothing to compare; leave out "
            "--against"
        )
    full, lines = setting_names(settings), setting_names(settings, PANEL)
    every = name_parts(settings)
    base: list[Setting] = []
    for texts in (
        [[name] for name in full],
        [[name] for name in lines],
        [w.values() for w in every],
    ):
        base = base or [s for s, own in zip(settings, texts, strict=True) if against in own]
    if not base:
        grids = [grid for setting in settings if (grid := setting.values.get(GRID, ""))]
        raise UserError(
            f"--against={against!r} is not a setting of these tables; give one of: "
            f"{'; '.join(dict.fromkeys([*grids, *lines]))}"
        )
    paired = ("seed", *dict.fromkeys([*PANEL, *differing_columns(base)]))
    scores = ["student", "auroc_student"] if base[0].values["num_classes"] == "2" else ["student"]
    table = [[f"minus {against}", *scores, "pairs"]]
    for setting, name in zip(settings, full, strict=True):
        if setting not in base:
            pairs = [_pairs(setting, base, paired, score) for score in scores]
            table.append([name, *map(_interval, pairs), str(len(pairs[0]))])
    return table


def _pairs(
    setting: Setting, base: Sequence[Setting], keys: Sequence[str], score: str
) -> list[float]:
    """Return the differences in points of all pairs of runs in which both have a score."""

    def scores(some: Sequence[Setting]) -> dict[tuple[str, ...], float]:
        runs = [(setting.values, run) for setting in some for run in setting.runs]
        return {
            tuple({**values, **run}.get(key, "") for key in keys): float(run[score])
            for values, run in runs
            if run.get(score)
        }

    known = scores(base)
    return [100 * (own - known[at]) for at, own in scores([setting]).items() if at in known]


def _interval(values: Sequence[float]) -> str:
    from scipy.stats import t

    if not values:
        return ""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return f"{mean:+.1f}"
    deviation = statistics.stdev(values)
    if count < LEAST_PAIRS:
        return f"{mean:+.1f} ± {deviation:.1f}"
    reach = t.ppf((1 + CONFIDENCE) / 2, count - 1) * deviation / count**0.5
    return f"{mean:+.1f} ± {deviation:.1f} ({mean - reach:+.1f} to {mean + reach:+.1f})"


# --- lines by alpha ---


@dataclass(frozen=True)
class Grid:
    """Students' accuracies, with a row for each method or line and a column for each alpha."""

    columns: Sequence[str]  # the titles of the columns
    # each row's name, its largest epsilon and, for each column, the mean and deviation in percent
    # (NaN if unknown) and whether the value is among the best
    rows: Sequence[tuple[str, float, Sequence[tuple[float, float, bool]]]]
    caption: str  # the meaning of the numbers

    @classmethod
    def of(cls, settings: Sequence[Setting]) -> "Grid":
        """Return the table of settings, with a column for each data set and alpha."""
        line = dict(zip(map(id, settings), setting_names(settings, PANEL), strict=True))
        groups = group_by_data(settings, alphas=True)
        columns = []
        for group in groups.values():
            scores = {line[id(s)]: s.score("student") for s in group}
            known = [score for score in scores.values() if not math.isnan(score[0])]
            top, reach = max(known, default=(math.nan, math.nan))
            least = top - (0 if math.isnan(reach) else reach)
            columns.append({name: (*score, score[0] >= least) for name, score in scores.items()})
        unknown = (math.nan, math.nan, False)
        rows = []
        scored = (s for s in settings if not math.isnan(s.score("student")[0]))
        for name in dict.fromkeys(line[id(s)] for s in scored):
            epsilon = max(s.epsilon(CLAIMS[0]) for s in settings if line[id(s)] == name)
            rows.append((name, epsilon, [column.get(name, unknown) for column in columns]))
        seeds = sorted({len(setting.runs) for setting in settings})
        number = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
        caption = (
            "Accuracy of students on the test images in %, mean and standard deviation over "
            f"{number} seed{'s' * (seeds != [1])}. Bold: the best of a column, and all within its "
            f"standard deviation. {_bounds(settings)}"
        )
        return cls(list(groups), rows, caption)

    def markdown(self) -> str:
        """Return the table with its caption."""
        lines = [["", *self.columns, "epsilon"]]
        for name, epsilon, cells in self.rows:
            texts = [
                f"**{spread(mean, deviation)}**" if best else spread(mean, deviation)
                for mean, deviation, best in cells
            ]
            lines.append([name, *texts, rounded_up(epsilon)])
        return f"{wrap_paragraph(self.caption)}\n\n{markdown_table(lines)}"

    def latex(self, label: str) -> str:
        """Return the table for LaTeX with booktabs, to be cited as tab:LABEL."""
        import pandas

        rows = []
        for name, epsilon, cells in self.rows:
            bound = "$\\infty$" if math.isinf(epsilon) else rounded_up(epsilon)
            rows.append([_latex(name), *(_latex_score(*cell) for cell in cells), bound])
        frame = pandas.DataFrame(rows, columns=["", *map(_latex, self.columns), "$\\varepsilon$"])
        table = frame.style.hide(axis="index").to_latex(
            caption=_latex(self.caption),
            label=f"tab:{label}",
            column_format=f"l{'c' * len(self.columns)}r",
            position_float="centering",
            hrules=True,
        )
        return f"{LATEX_START}\n{table}"


def _bounds(settings: Sequence[Setting]) -> str:
    proven = [s for s in settings if 0 < s.epsilon(CLAIMS[0]) < math.inf]
    if not proven:
        return "No epsilon is proven for a record."
    together = Setting({}, [run for setting in proven for run in setting.runs])
    notes = f" Caveats: {', '.join(together.caveats)}." if together.caveats else ""
    return (
        "Epsilon: the largest proven for a run of the row (record, add_remove, trust "
        f"{together.all_of('trust')}, delta {together.all_of('delta')}).{notes}"
    )


def _latex_score(mean: float, deviation: float, best: bool) -> str:
    if math.isnan(mean):
        return "--"
    text = f"\\textbf{{{mean:.1f}}}" if best else f"{mean:.1f}"
    return text if math.isnan(deviation) else f"{text} $\\pm$ {deviation:.1f}"


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text)
