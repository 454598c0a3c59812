"""The commands `fed-dpsd privacy`: planned costs, actual costs, and attacks on the claims."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from fed_dpsd.cli.console import AsJson, Overrides, console, importing, say, say_failed
from fed_dpsd.errors import UserError, shown
from fed_dpsd.progress import PlainConsole, show_progress

if TYPE_CHECKING:
    from fed_dpsd.accounts.entry import Entry
    from fed_dpsd.privacy.epsilon import Epsilon
    from fed_dpsd.privacy.mechanism import Basis, Relation, Unit

    Proofs = Mapping[Basis, Epsilon]
    Pair = tuple[Unit, Relation]

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,  # click does
    help="Plan the privacy cost of a run, read what clients have spent, and attack the claims.",
)
UNEXPECTED = 3  # exit code of an audit with an unexpected outcome


def plan(overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the privacy cost of a run without running it; nothing is spent.

    The last lines estimate its memory, disk and messages. A run that does not fit is an error.

    Example: fed-dpsd privacy plan

    Or: fed-dpsd privacy plan privacy.target_epsilon=1

    Read on: docs/privacy.md
    """
    with importing():
        from fed_dpsd import api
        from fed_dpsd.needs import needs_of, require_room

    planned = api.plan(*(overrides or ()))
    if as_json:
        queries, card = planned.queries_per_client, planned.privacy.content
        budget = planned.smallest_budget
        facts = {"queries_per_client": queries, "privacy": card}
        print(json.dumps(facts | {"smallest_budget": "inf" if math.isinf(budget) else budget}))
    else:
        for line in planned.experiment.warnings:
            say(f"warning: {line}")
        print(f"{planned}\n{needs_of(planned.experiment)}")
    require_room(planned.experiment)


def audit(
    overrides: Overrides = None,
    broken: Annotated[
        Literal["half", "none"] | None,
        typer.Option(help="Attack a hospital that adds half of the claimed noise, or almost none."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test a client's code: attack its releases, and check its draws and charges.

    To test the code, attacks run at settings where they come close to the proof; they also run at
    the run's own settings. Checks find noise that is used twice and requests that cost too little.
    With --broken, the attacks must succeed: an audit that misses a broken hospital is blind.

    Example: fed-dpsd privacy audit training=plain

    Or: fed-dpsd privacy audit training=plain --broken half

    Read on: docs/audits.md
    """
    from fed_dpsd.api import experiment_of
    from fed_dpsd.audits.conformance import audit_client

    experiment = experiment_of(overrides or ())
    with show_progress(console):
        found = audit_client(experiment, broken, say)
    if as_json:
        *code, claim = [attack.to_json() | {"key": attack.key} for attack in found.attacks] or [{}]
        named = {named.pop("key"): named for named in code}
        more: dict[str, Any] = {"checks": [check.to_json() for check in found.checks]}
        more |= {"failure_probability_in_all": found.failure_probability}
        more |= {"broken": broken, "as_expected": found.as_expected, "untested": found.untested}
        claim.pop("key", None)
        print(json.dumps(claim | named | more))
    else:
        print("Statistical attacks")
        for attack in found.attacks:
            print(f"  {attack.title}: {attack.mechanism}")
            for sentence in attack.verdict():
                print(f"    {sentence}")
        print("Checks of draws and charges")
        for check in found.checks:
            print(f"  {check}")
        print("contradicted" if found.contradicts else "nothing is contradicted")
        if found.untested:
            print(f"not tested: the noise of {found.untested}, which no attack knows")
        if broken:
            noise = "half of the noise" if broken == "half" else "next to no noise"
            verdict = "refuted, as expected" if found.refuted else "NOT refuted: the audit is blind"
            print(f"a hospital with {noise}: {verdict}")
    if not found.as_expected:
        raise typer.Exit(UNEXPECTED)


def attack(
    kind: Annotated[
        Literal["membership", "inversion"],
        typer.Argument(
            help="membership: who was in the training data; inversion: what records look like."
        ),
    ],
    path: Annotated[
        Path, typer.Argument(help="Folder of a sweep with partition=coins.", metavar="SWEEP")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: the sweep's.")
    ] = None,
) -> None:
    """Attack the trained models of a sweep, and print the paths of the table and the figure.

    First run `fed-dpsd sweep experiment=attack_membership`, or attack_inversion. A membership
    attack that succeeds beyond the cap of a proven epsilon refutes the proof. A failed attack
    proves nothing.

    Example: fed-dpsd privacy attack membership runs/sweep

    Read on: docs/audits.md
    """
    from fed_dpsd.audits import inversion, membership
    from fed_dpsd.report import figures, plots, tables
    from fed_dpsd.storage import to_utf8, write_atomically

    sweep, contradicted = path.absolute(), []
    folder = (out or (sweep if sweep.is_dir() else sweep.parent)).absolute()
    table = folder / f"{kind}.csv"
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        # One by one, because an attack takes minutes.
        write_atomically(table, to_utf8(tables.csv_text(rows)))

    with show_progress(console):
        if kind == "membership":
            curves = []
            for outcome in membership.attack(sweep, say):
                add(row := outcome.to_row())
                contradicted += [row] if outcome.contradicts else []
                if outcome.attack == "lira":
                    curves.append((outcome.victim, row["setting"], outcome.curve))
            figure = plots.draw_roc(curves)
        else:
            pictures = []
            for drawn in inversion.attack(sweep, say):
                add(drawn.to_row())
                words = (drawn.setting, drawn.victim, drawn.attack)
                pictures.append((", ".join(filter(None, words)), drawn.pictures))
            figure = plots.draw_pictures(pictures)
    print(table)
    print(figures.save(figure, table.with_suffix(".png")))
    for row in contradicted:
        wrong = f"the proof of epsilon {row['epsilon_proven']} (record, add_remove), or its code,"
        if row["victim"] == "untrained teachers":
            wrong = "no model was trained on these records, so the attack itself"
        say_failed(
            f"more than the proof allows: {row['setting']}, {row['victim']}, {row['attack']}: "
            f"{wrong} is wrong, unless other seeds contradict this"
        )
    if contradicted:
        raise typer.Exit(UNEXPECTED)


def ledger(
    path: Annotated[Path, typer.Argument(help="A ledger, a folder of ledgers, or a run folder.")],
    delta: Annotated[
        float, typer.Option(help="Failure probability (delta) of the printed epsilons.")
    ] = 1e-5,
    charges: Annotated[
        bool, typer.Option("--charges", help="Also print every charge, unit and relation.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print each client's charges and the epsilons that they prove. Nothing is written.

    Example: fed-dpsd privacy ledger runs/RUN

    Read on: docs/privacy.md
    """
    with importing():
        from fed_dpsd.accounts.card import ledger_epsilons, ledgers_at, row_of
        from fed_dpsd.accounts.secret import has_secret, own_ledger_folder
        from fed_dpsd.accounts.words import NO_SECRET_NOTE
        from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
        from fed_dpsd.server.charge_log import ChargeLog

    if not 0 < delta < 1:
        raise UserError(f"--delta {delta:g} must be strictly between 0 and 1")
    accounts = ledgers_at(path)
    if not accounts and ChargeLog(path, {}).charged.total():
        raise UserError(
            f"{own_ledger_folder(path)} is missing, but charges.json records charges of this run; "
            "restore the folder from a backup (summary.json still states the run's own cost)"
        )
    notes = {file: () if has_secret(file) else (NO_SECRET_NOTE,) for file in accounts}
    totals = {
        file: {
            pair: ledger_epsilons(entries, delta, *pair, notes[file])
            for pair in UNITS_AND_RELATIONS
        }
        for file, entries in accounts.items()
    }
    if as_json:
        listed = {
            str(file): {
                "entries": [json.loads(entry.to_json()) for entry in entries],
                "spent": [row_of(proofs) for proofs in totals[file].values()],
            }
            for file, entries in accounts.items()
        }
        print(json.dumps(listed))
        return
    if not accounts:
        print(shown(f"nothing was charged in this run: {path}"))
        return
    if charges:
        for file, entries in accounts.items():
            _print_charges(file, entries, totals[file].values(), delta)
    PlainConsole().print(_spent_table(accounts, totals))
    for sentence in _meanings(totals, delta):
        print(sentence)


def _print_charges(
    file: Path, entries: Sequence["Entry"], totals: Iterable["Proofs"], delta: float
) -> None:
    from fed_dpsd.accounts.card import ledger_epsilons, row_of
    from fed_dpsd.accounts.words import line

    print(shown(str(file)))
    for number, entry in enumerate(entries, start=1):
        request = f" to request {entry.query_id}" if entry.request else ""
        so_far = line(row_of(ledger_epsilons(entries[:number], delta, "record", "add_remove")))
        print(
            f"{entry.at} {entry.run or 'unnamed run'}: {entry.kind}{request}, "
            f"{entry.queries:,} queries, {entry.digest[:12]}: so far {so_far}"
        )
    for proofs in totals:
        notes = ", ".join(next(iter(proofs.values())).notes)
        print(f"spent: {line(row_of(proofs))}; {notes}")


def _spent_table(
    accounts: Mapping[Path, Sequence["Entry"]], totals: Mapping[Path, Mapping["Pair", "Proofs"]]
) -> Table:
    """Return a row per client, with the epsilons of a record and of meaningful larger units."""
    from fed_dpsd.accounts.words import is_meaningful
    from fed_dpsd.privacy.epsilon import NOT_REVIEWED
    from fed_dpsd.privacy.mechanism import combined_trust

    spent = {
        file: {pair: next(iter(proofs.values())) for pair, proofs in of_file.items()}
        for file, of_file in totals.items()
    }
    pairs = list(next(iter(spent.values())))
    shown = [
        pair
        for pair in pairs
        if pair[0] == "record" or any(is_meaningful(e[pair]) for e in spent.values())
    ]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("client")
    for name in ("charges", "queries", *(f"{unit},\n{relation}" for unit, relation in shown)):
        table.add_column(name, justify="right")
    table.add_column("trust")
    for file, entries in accounts.items():
        own = [spent[file][pair] for pair in shown]
        queries = sum(entry.queries for entry in entries)
        cells = (f"{len(entries):,}", f"{queries:,}", *(epsilon.number for epsilon in own))
        review = f" ({NOT_REVIEWED})" if any(epsilon.review for epsilon in own) else ""
        table.add_row(file.stem + review, *cells, combined_trust(epsilon.trust for epsilon in own))
    return table


def _meanings(totals: Mapping[Path, Mapping["Pair", "Proofs"]], delta: float) -> Iterator[str]:
    from fed_dpsd.accounts.words import against

    records = [of_file["record", "add_remove"] for of_file in totals.values()]
    claims = [next(iter(proofs.values())) for proofs in records]
    notes = dict.fromkeys(note for claim in claims for note in claim.notes)
    yield (
        f"Epsilons at delta {delta:g}, rounded up; {', '.join(notes)}. --charges lists every "
        "charge, unit and relation."
    )
    every = [proofs for of_file in totals.values() for proofs in of_file.values()]
    if any(proof.trust == "threshold" for proofs in every for proof in proofs.values()):
        yield f"Trust threshold: against {against('threshold', None)}."
    bases = {next(iter(proofs)) for proofs in records if len(proofs) > 1}
    if "training" in bases:
        yield (
            "The training of the teachers covers their answers: they are post-processing of "
            "private training and cost nothing more."
        )
    if bases - {"training"}:
        yield "A budget counts private training but not the teachers' answers: more of it is spent."
