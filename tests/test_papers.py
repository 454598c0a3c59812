"""results/papers.md: printed numbers are the papers', measured ones the files'; rows compose."""

import csv
import functools
import operator
import pydoc
import re
import shlex
from pathlib import Path

import pytest

from fed_dpsd.accounts.card import planned_run
from fed_dpsd.config.compose import compose
from fed_dpsd.config.grid import expand
from fed_dpsd.experiment import set_up
from fed_dpsd.privacy.epsilon import rounded_up
from fed_dpsd.report.settings import read_settings
from fed_dpsd.storage import conf_folder
from tests.tables import read_files

PAPERS = read_files()
RESULTS = Path(__file__).parents[1] / "results"
WHERE, COMMAND, PRINTED, MEASURED, PROVEN, READING, COMMIT = HEAD = [
    *("where printed", "command", "printed", "measured"),
    *("epsilon_proven", "reading or difference", "commit"),
]
NUMBER = r"\d[\d,]*(?:\.\d+)?"
SCORE = r"\d+\.\d+ ± \d+\.\d+"
# A bare number is for a record in both relations, at delta 1e-5, with trust in nobody.
NOTE = r"label, replace_one, delta 0|record|trust server|(?:(?:sigma|T|b|k) \d+, )?delta 0|\w+ \d+"
EPSILON = re.compile(rf"-|(?:inf|{NUMBER})(?: add_remove| replace_one)?(?: \((?:{NOTE})\))?")
MEASUREMENT = re.compile(
    rf"-|data needed|GPU needed|not measured|\d+\.\d \(seed 0\)|{SCORE}(?: to {SCORE})?"
    rf"|{SCORE} \((?:minutes|Inception score)\)"
)
MOST_WORDS = 12


def items():
    """Each paper's rows of its table, with the names of the columns; a heading names the paper."""
    found = {}
    for line in (RESULTS / "papers.md").read_text().splitlines():
        if line.startswith("## "):
            below = found.setdefault(re.match(r"## ([\w-]+)", line)[1], [])
        elif line.startswith("| ") and line[2:-2].split(" | ") != HEAD:
            below.append(dict(zip(HEAD, line[2:-2].split(" | "), strict=True)))
    return {paper: [row for row in rows if row[WHERE] != "---"] for paper, rows in found.items()}


EVERY = [(paper, row) for paper, found in items().items() for row in found]
SPANS = sorted({row[COMMAND].strip("`") for _, row in EVERY if row[COMMAND] != "-"})


def base(row):
    """The numbered item that a row is about, without which part of it."""
    return re.split(r"[:,]", row[WHERE])[0]


def linked(cell):
    """The text and the address of a link; "-" has none."""
    return re.fullmatch(r"\[([^]]+)\]\(([^)]+)\)", cell).groups() if cell != "-" else ("", "")


def numbers_below(content):
    """Every number of a paper's file, or of a part of it."""
    if isinstance(content, str):
        return {content.replace(",", "")}
    values = content.values() if isinstance(content, dict) else content
    return set().union(*map(numbers_below, values))


def test_every_paper_has_a_table():
    assert {paper for paper, _ in EVERY} == {"DPSD", "DPDFD", "DP-DFD", "DGD"}


def test_what_is_printed_is_in_the_papers_file():
    for paper, row in EVERY:
        if row[PRINTED].startswith("["):
            assert linked(row[PRINTED])[1].endswith(f"/{paper.lower().replace('-', '_')}.yaml")
            continue
        content = PAPERS[paper]
        printed = numbers_below(content.get("tables", {}).get(base(row), content))
        cells = [] if row[PRINTED] == "-" else row[PRINTED].replace(",", "").split("; ")
        assert set(cells) <= printed, row


def test_each_table_and_figure_of_the_papers_files_has_a_row():
    for paper, rows in items().items():
        text = " ".join(row[WHERE] for row in rows)
        for item in (*PAPERS[paper].get("tables", {}), *PAPERS[paper]["figures"]):
            numbers = re.findall(r"\b(?:\d+|[IVX]+(?:-[A-Z])?)\b", item)
            kind = item.split()[0].rstrip("s.")
            for number in numbers:
                assert re.search(rf"\b{kind}s?\.? (?:\S+ and )?{number}\b", text), (paper, item)


def test_a_proven_epsilon_has_its_unit_and_relation():
    parts = [part for _, row in EVERY for part in re.split("; | to ", row[PROVEN])]
    assert [part for part in parts if not EPSILON.fullmatch(part)] == []


def test_a_cell_is_short():
    for _, row in EVERY:
        for cell in row.values():
            assert len(re.sub(r"\]\([^)]*\)", "]", cell).split()) <= MOST_WORDS, cell


def test_what_is_not_measured_has_a_reason():
    for _, row in EVERY:
        assert MEASUREMENT.fullmatch(row[MEASURED]), row
        assert (row[COMMIT] != "-") == (row[MEASURED][0].isdigit()), row
        if row[COMMIT] == "-":
            assert row[READING] != "-", row


def score(setting, unit=""):
    """A setting's score as it is printed."""
    column, scale, digits = ("seconds_rounds", 1 / 60, 3) if unit else ("student", 100, 1)
    mean, deviation = (value + 1e-9 for value in setting.spread(column, scale=scale))
    if len(setting.runs) == 1:
        return f"{mean:.{digits}f} (seed {setting.runs[0]['seed']})"
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def proven(setting):
    """A setting's epsilon of a record, or also of a label, as it is printed."""
    added, replaced = (
        rounded_up(setting.epsilon(f"record_{relation}"), 5)
        for relation in ("add_remove", "replace_one")
    )
    if setting.label_epsilon is not None:
        label = rounded_up(setting.label_epsilon, 5)
        delta = float(setting.all_of("label_delta"))
        return f"{label} (label, replace_one, delta {delta:g}); {added} (record)"
    if added != replaced:
        return f"{added} add_remove; {replaced} replace_one"
    notes = ["delta 0"] if float(setting.all_of("delta")) == 0 else []
    notes += [] if (trust := setting.all_of("trust")) == "nobody" else [f"trust {trust}"]
    return f"{added} ({', '.join(notes)})" if notes and added != "inf" else added


def same(one, other):
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def settings_of(row):
    """The settings of the file that a row links to which have what the row's command names."""
    known = read_settings([RESULTS / linked(row[COMMIT])[1]])
    words, only = split(row[COMMAND].strip("`"))
    typed = dict(word.partition("=")[::2] for word in words if not word.startswith("experiment="))
    named = [setting for setting in known if setting.values.get("grid") in only]
    return [
        setting
        for setting in named or known  # files from before an entry got its name have another
        if all(same(setting.values.get(key, value), value) for key, value in typed.items())
    ]


def test_what_is_measured_is_in_the_file_with_its_commit_and_epsilon():
    checked = 0
    for _, row in EVERY:
        commit, file = linked(row[COMMIT])
        if not commit or file.startswith("attacks"):
            continue
        cell, _, unit = row[MEASURED].removesuffix(" (seed 0)").partition(" (")
        scores = cell.split(" to ")
        settings = settings_of(row)
        for text in scores:
            found = [each for each in settings if score(each, unit).startswith(text)]
            assert found, row
            if len(scores) == 1:
                commits = [run["commit"] for each in found for run in each.runs]
                assert any(each[:8] == commit[:8] for each in commits), row
                assert any(each.endswith("+dirty") for each in commits) == ("+" in commit), row
                assert row[PROVEN] in map(proven, found), row
        if len(scores) > 1:
            every = {proven(each).partition(" ")[0] for each in read_settings([RESULTS / file])}
            parts = re.split("; | to ", row[PROVEN])
            assert {part.partition(" ")[0] for part in parts} <= every, row
        checked += 1
    assert checked > 150


def test_inception_scores_are_in_the_file_with_their_commit_and_epsilon():
    rows = [row for _, row in EVERY if "Inception" in row[MEASURED]]
    assert len(rows) > 5
    for row in rows:
        commit, file = linked(row[COMMIT])
        (setting,) = split(row[COMMAND].strip("`"))[1]
        with (RESULTS / file).open(newline="") as lines:
            found = [
                f"{each['epsilon_proven']} {each['relation']}".replace("inf add_remove", "inf")
                for each in csv.DictReader(lines)
                if each["setting"] == setting
                and each["victim"] == "student"
                and each["commit"].startswith(commit)
                and row[MEASURED].startswith(
                    f"{float(each['inception']):.2f} ± {float(each['inception_deviation']):.2f} "
                )
            ]
        assert found == [row[PROVEN]], row


def split(words):
    """A command's overrides, and the entries that `--only` names."""
    typed = shlex.split(words)
    only = typed[typed.index("--only") + 1 :][:1] if "--only" in typed else []
    return [word for word in typed if word not in ("--only", *only)], only


def test_what_has_no_key_is_a_function():
    assert all(pydoc.locate(span) for span in SPANS if "=" not in span)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder for data.path, with a file of each teacher; the noise of a target is not sought."""
    monkeypatch.setattr("fed_dpsd.experiment.calibrate", lambda spend, target, least, most: least)
    (tmp_path / "teachers").mkdir()
    for name in re.findall(r"teachers/\S+", (conf_folder() / "experiment/fig4.yaml").read_text()):
        (tmp_path / name.strip("}")).touch()
    return tmp_path


@pytest.mark.slow(seconds=60)
def test_what_is_named_composes_and_plans(files):
    """No data is read. Cells that choose the same groups are composed once."""
    composed = {}
    for words in (span for span in SPANS if "=" in span):
        typed, only = split(words)
        for _, cell in expand([*typed, f"data.path={files}"], only):
            chosen = tuple((k, v) for k, v in cell.items() if (conf_folder() / k).is_dir())
            if chosen not in composed:
                composed[chosen] = compose([f"{key}={value}" for key, value in cell.items()])
                assert set_up(composed[chosen], files).plan.queries >= 0, words
            for key in cell.keys() - dict(chosen).keys() - {"training@method.baseline"}:
                functools.reduce(operator.getitem, key.split("."), composed[chosen])


@pytest.mark.slow
def test_computed_epsilons_are_those_of_the_plan(files):
    rows = [row for _, row in EVERY if "computed" in row[READING]]
    assert len(rows) > 5
    for row in rows:
        words = row[COMMAND].strip("`").split()
        planned = planned_run(set_up(compose([*words, f"data.path={files}"]), files))
        bounds = [each for each in planned.privacy.proven if each.unit == "record"]
        assert [each.relation for each in bounds] == ["add_remove", "replace_one"]
        for each in bounds:
            assert (rounded_up(each.value, 5), each.trust) == (row[PROVEN], "nobody"), row
