"""The page of one run, or of a deployment: the result first, then all that stands behind it."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fed_dpsd.report import guarantee, rounds
from fed_dpsd.report.classes import classes, right_and_all
from fed_dpsd.report.document import Section, document
from fed_dpsd.report.facts import Facts, Unfinished
from fed_dpsd.report.hospitals import hospitals
from fed_dpsd.report.markup import Content, Html, element, folded, html, paragraphs, table, terms
from fed_dpsd.report.numbers import (
    counted,
    duration,
    percent,
    percent_at_most,
    rounded_up,
    size,
    wilson,
    with_interval,
)

MOST_CLIENTS = 50  # rows of a table that can be read


def page(facts: Facts) -> str:
    """Return the page's text."""
    of = "run" if facts.simulated else "deployment"
    where = f"{counted(facts.summary['num_clients'], facts.clients)}"
    title = f"{facts.summary['method']} on {facts.summary['data']}: a {of} with {where}"
    title += ", not finished" * bool(facts.unfinished)
    kind = f"Report of one {of} of FedDPSD · {facts.name} · seed {facts.summary['seed']}"
    sections = [
        Section("privacy", "What is protected, and what is not", guarantee.statement(facts)),
        Section("hospitals", "Hospitals", hospitals(facts)),
        Section("rounds", "Over the rounds", rounds.whole_run(facts)),
        Section("images", "Synthetic images over time", rounds.pictures(facts)),
        Section("classes", "Class by class", classes(facts)),
        Section("clients", "Client by client", _clients(facts)),
        Section("traffic", "Communication and time", _traffic(facts)),
        Section("repeat", "Settings, and how to repeat it", _repeat(facts)),
    ]
    return document(title, kind, _lead(facts), sections, list(_origin(facts)))


# --- the result ---


def _lead(facts: Facts) -> Html:
    first = _so_far(facts, facts.unfinished) if facts.unfinished else _ended(facts)
    return html([*first, *_warnings(facts), _tiles(facts)])


def _ended(facts: Facts) -> Iterator[Html]:
    yield element("p", f"{_result(facts)} {_cost(facts)}", class_="lead")


def _so_far(facts: Facts, unfinished: Unfinished) -> Iterator[Html]:
    """Yield how far an unfinished run came, what is spent for good, and the command to go on."""
    of = "run" if facts.simulated else "deployment"
    said = f"This {of} is not finished: {unfinished.told}"
    yield element("p", f"{said} {guarantee.spent(facts)}", class_="lead")
    yield paragraphs(
        "What is charged stays charged, whether the run goes on or not. "
        + (
            "The command that writes this page again:"
            if unfinished.under_way
            else "The command to go on, which charges nothing twice:"
        )
    )
    yield element("pre", element("code", unfinished.command))
    yield paragraphs(f"`{unfinished.name}` stands for the path of the run folder.")
    if facts.summary["accuracy"]["student"] is not None:
        yield paragraphs(f"After round {unfinished.done:,}: {_result(facts)}")


def _result(facts: Facts) -> str:
    """Return the result in one sentence."""
    summary = facts.summary
    accuracy, counts = summary["accuracy"]["student"], right_and_all(facts)
    asked = counted(len(facts.rounds), "round")
    if summary["student_sha256"] is None and not facts.unfinished:
        return f"This method trains no student of its own; it ended after {asked}."
    if accuracy is None:
        return (
            f"A student was trained in {asked}; how good it is, is unknown here, since no public "
            "test images were given."
        )
    if counts is None:
        return f"The student names the class of {percent(accuracy)} of the test images."
    low, high = wilson(*counts)
    return (
        f"The student names the right class for {percent(accuracy)} of {counts[1]:,} test images "
        f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %), where guessing has "
        f"{percent(1 / len(facts.classes), 0)}."
    )


def _cost(facts: Facts) -> str:
    """Return what that has cost, in one sentence, with the epsilon's whole meaning."""
    if facts.releases_nothing:
        return f"Nothing left the {facts.clients}s."
    row = facts.row("record", "add_remove")
    if math.isinf(float(row["epsilon"])):
        return "Nothing is proven of the privacy of a record."
    what = "With secret noise, what" if facts.seeded else "What"
    said = f"{what} left the {facts.clients}s is proven to cost at most {guarantee.short(row)}"
    if not facts.meaningful:
        return f"{said}, which protects no record in practice."
    return (
        f"{said}. If a fair coin decides whether one record is there, "
        f"{guarantee.ONLOOKERS[row['trust']]} guesses it right in at most "
        f"{percent_at_most(guarantee.right_at_most(row))} of cases."
    )


def _warnings(facts: Facts) -> Iterator[Html]:
    if facts.seeded:
        yield element(
            "div",
            paragraphs(
                "A simulation: its noise follows from a public seed, so these files themselves "
                "carry no guarantee. The numbers are those of the same run with secret noise."
            ),
            class_="note",
        )


def _tiles(facts: Facts) -> Html:
    scores = facts.summary["accuracy"]
    tiles: list[tuple[Content, Content]] = []
    if counts := right_and_all(facts):
        share, _, interval = with_interval(*counts).partition(" (")
        said = f"95 % interval {interval.rstrip(')')}"
        tiles.append(("accuracy of the student", html([element("strong", share), said])))
    if scores["ensemble"] is not None:
        said = "all teachers together"
        tile = html([element("strong", percent(scores["ensemble"])), said])
        tiles.append(("accuracy of the ensemble", tile))
    tiles.append(guarantee.tile(facts))
    if facts.rounds:
        line = facts.rounds[-1]
        if (agreed := line.get("agreement")) is not None:
            said = "of the last round's images, before learning from them"
            tiles.append(
                ("agreement with the answers", html([element("strong", percent(agreed)), said]))
            )
        if facts.answers_images and (queries := line["answered_queries"]):
            said = f"synthetic, in {counted(len(facts.rounds), 'round')}"
            tiles.append(("images answered", html([element("strong", f"{queries:,}"), said])))
    return terms(tiles, class_="tiles")


# --- clients ---


def _clients(facts: Facts) -> Iterator[Html]:
    """Yield the table of the simulated clients; hospitals have a section of their own."""
    if not facts.simulated:
        return
    summary = facts.summary
    accuracies, areas = (summary[metric]["clients"] or [] for metric in ("accuracy", "auroc"))
    refused: dict[int, int] = {}
    for line in facts.rounds:
        for client in line["refused"]:
            refused[int(client)] = refused.get(int(client), 0) + 1
    numbers = list(range(summary["num_clients"]))
    if len(numbers) > MOST_CLIENTS and accuracies:
        known = [each for each in accuracies if each is not None]
        yield paragraphs(
            f"Of {len(numbers):,} clients the first {MOST_CLIENTS} are shown. Over all of them, "
            f"the accuracy of their own teachers goes from {percent(min(known))} to "
            f"{percent(max(known))}."
        )
    rows = []
    for number in numbers[:MOST_CLIENTS]:
        spent = facts.costs.get(number)
        rows.append(
            [
                f"client {number}",
                *(_scores(number, accuracies, areas) if accuracies else []),
                "unknown" if spent is None else rounded_up(spent),
                *([facts.ledgers.get(number, "unknown")] if facts.ledgers else []),
                f"{refused.get(number, 0):,}",
            ]
        )
    row = facts.row("record", "add_remove")
    shared = " The ledger is one that runs share: it has the charges of all of them."
    scored = "the mean of its own teachers on the test images, measured without noise, and "
    scored *= bool(accuracies)  # scores that no epsilon covers are kept apart, and not shown
    yield table(
        f"Each client: {scored}the epsilon that the run has cost it (record, add_remove, trust "
        f"{row['trust']}, delta {row['delta']:g}{guarantee.review(row)})."
        + shared
        * bool(facts.ledgers),
        [
            "client",
            *(["own teachers' accuracy", "own teachers' AUROC"] if accuracies else []),
            "epsilon spent",
            *(["its ledger, over its life (record, add_remove)"] if facts.ledgers else []),
            "refused rounds",
        ],
        rows,
    )


def _scores(
    client: int, accuracies: Sequence[float | None], areas: Sequence[float | None]
) -> tuple[str, str]:
    if client >= len(accuracies):
        return "unknown", "unknown"
    area = areas[client]
    return percent(accuracies[client]), "unknown" if area is None else f"{area:.3f}"


# --- traffic, settings, and how to repeat it ---


def _traffic(facts: Facts) -> Iterator[Html]:
    queries, seconds = facts.summary["queries"], facts.summary["seconds"]
    clients = facts.summary["num_clients"]
    asked, answered = queries["bytes_to_clients"], queries["bytes_to_server"]
    images = facts.rounds[-1]["answered_queries"] if facts.rounds else 0
    each = images * (facts.settings.get("clients_per_round") or clients) * facts.answers_images
    rows = [
        [said, size(count), size(count / clients), *([size(count / each)] if each else [])]
        for said, count in (
            (f"asked, server to {facts.clients}s", asked),
            (f"answered, {facts.clients}s to server", answered),
        )
    ]
    own = [f"for each {facts.clients}", f"for each image and {facts.clients} asked"]
    yield table(
        "Payload of all rounds, without what the transport adds.",
        ["direction", "in all", *own[: 1 + bool(each)]],
        rows,
    )
    worked = seconds["teachers"] + seconds["rounds"]  # the total is of the last process alone
    yield terms(
        [
            ("time in all, without pauses", duration(max(seconds["total"], worked))),
            *(
                [("of it, teachers and diagnostics", duration(seconds["teachers"]))]
                if facts.simulated
                else []
            ),
            ("of it, rounds", duration(seconds["rounds"])),
            ("teachers' answers", f"{queries['forward_answers']:,} (images times teachers)"),
            ("of them, with a gradient", f"{queries['backward_answers']:,}"),
        ],
        class_="facts",
    )


def _repeat(facts: Facts) -> Iterator[Html]:
    if facts.command:
        yield element("pre", element("code", facts.command.replace("`", "'")))
        yield paragraphs(
            _again(facts),
            "FOLDER and FILE stand for paths of the machine that it ran on."
            if "=FOLDER" in facts.command or "=FILE" in facts.command
            else "",
        )
    else:
        yield paragraphs("All settings are in config.yaml of the run folder, and here.")
    found = facts.summary["diagnostics"]
    if counts := found.get("data"):
        own = "No epsilon covers these exact numbers." if facts.simulated else "They are public."
        yield folded("Files and rows of the data", paragraphs(*counts, found["unused"], own))
    yield folded(f"All {len(facts.settings)} settings", list(_settings(facts)))
    rows = [(f"`{name}`", str(version)) for name, version in facts.versions.items() if version]
    if digest := facts.summary["student_sha256"]:
        rows.append(("SHA-256 of the student", f"`{digest}`"))
    yield folded("Versions, machine, and the student's digest", terms(rows, class_="facts"))


def _again(facts: Facts) -> str:
    """Return what the command gives, and what it leaves out."""
    said = "This command has the same settings"
    if not facts.simulated:
        return (
            f"{said}; APP is the app's folder. Hospitals draw secret noise, so that another run "
            "gives another student."
        )
    if facts.ledgers:
        said += ", except ledger=FOLDER, where charges of other runs stand, too"
    if facts.settings.get("noise") == "secure":
        return f"{said}. Its noise is secret, so that another run gives another student."
    return (
        f"{said}. On the same machine with the same versions it gives the same student, bit by "
        "bit. Another processor rounds otherwise, so its noise falls otherwise."
    )


def _settings(facts: Facts) -> Iterator[Html]:
    """Yield the settings that name no place, those of the run before those of its parts."""
    groups: dict[str, list[tuple[Content, Content]]] = {"": []}
    for key, value in facts.settings.items():
        group, _, _ = key.rpartition(".")
        text = value if isinstance(value, str) else json.dumps(value)
        groups.setdefault(group, []).append((f"`{key}`", f"`{text}`"))
    for pairs in groups.values():
        yield terms(pairs, class_="facts")


def _origin(facts: Facts) -> Iterator[str]:
    where: Mapping[str, Any] = facts.versions
    yield (
        f"Written by `fed-dpsd report` from the run folder {facts.name}. Commit "
        f"{where.get('commit') or 'unknown'}, FedDPSD {where.get('fed-dpsd', 'unknown')}, machine: "
        f"{where.get('machine', 'unknown')}."
    )
    if evaluated := facts.summary["accuracy"]["evaluated_on"]:
        yield f"Accuracies are of the last round, on {evaluated}; never the best of all rounds."
