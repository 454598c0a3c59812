"""The commands `fed-dpsd privacy`: planned costs, costs so far, and attacks on both claims."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fed_dpsd.cli.console import AsJson, Overrides, console, say
from fed_dpsd.cli.show_config import ShowConfig, print_config
from fed_dpsd.display import shown
from fed_dpsd.errors import UserError

if TYPE_CHECKING:
    from fed_dpsd.privacy.mechanism import Basis, Epsilon

app = typer.Typer(
    no_args_is_help=True,
    help="What a run would cost in privacy, what clients have spent, and attacks on the claims.",
)
UNEXPECTED = 3  # exit code of an audit with an unexpected outcome


def plan(
    overrides: Overrides = None, as_json: AsJson = False, show_config: ShowConfig = False
) -> None:
    """Print what a run would cost in privacy, and about how long it takes; nothing is spent."""
    from fed_dpsd import api

    if show_config:
        print_config(overrides or [])
        return
    planned = api.plan(*(overrides or ()))
    if as_json:
        queries, card = planned.queries_per_client, planned.privacy.content
        print(json.dumps({"queries_per_client": queries, "privacy": card}))
        return
    Console(highlight=False).print(str(planned), markup=False, soft_wrap=True)


def audit(
    overrides: Overrides = None,
    broken: Annotated[
        Literal["half", "none"] | None,
        typer.Option(
            help="Attack a hospital that adds half of the noise that it claims, or next to none."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the code that hospitals run, and say which of its epsilons are refuted.

    Attacks run at settings where they come close to the proof, to test the code, and at the run's
    own settings. With --broken the attacks have to succeed: an audit that misses is blind.
    """
    from fed_dpsd.audits.attacks import attacks
    from fed_dpsd.config import compose
    from fed_dpsd.experiment import set_up

    experiment = set_up(compose(overrides or []), Path.cwd())
    with shown(console):
        outcomes = list(attacks(experiment, broken, say))
    *code, claim = outcomes
    refuted = all(attack.contradicts for attack in outcomes if attack.tests_code)
    expected = refuted if broken else not any(attack.contradicts for attack in outcomes)
    if as_json:
        names = ("check", "counts", "answers") if len(code) > 2 else ("check", "answers")
        named = dict(zip(names, (attack.to_json() for attack in code), strict=False))
        more = {"broken": broken, "as_expected": expected}
        print(json.dumps(claim.to_json() | named | more))
    else:
        out = Console(highlight=False)
        for attack in outcomes:
            out.print(f"{attack.title}: {attack.mechanism}", markup=False, soft_wrap=True)
            for sentence in attack.verdict():
                out.print(f"  {sentence}", markup=False, soft_wrap=True)
        if broken:
            noise = "half of the noise" if broken == "half" else "next to no noise"
            verdict = "refuted, as it has to be" if refuted else "NOT refuted: the audit is blind"
            out.print(f"a hospital with {noise}: {verdict}", soft_wrap=True)
    if not expected:
        raise typer.Exit(UNEXPECTED)


def ledger(
    path: Annotated[Path, typer.Argument(help="A ledger file, a folder of them, or a run folder.")],
    delta: Annotated[
        float, typer.Option(help="Probability of failure, delta, at which epsilons are printed.")
    ] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Print what each client was charged so far, and what that proves. Nothing is written."""
    from fed_dpsd.accounts.card import account, ledger_files
    from fed_dpsd.accounts.reading import read
    from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS

    if not 0 < delta < 1:
        raise UserError(f"--delta {delta:g} must be between 0 and 1, both excluded")
    accounts = {file: read(file) for file in ledger_files(path)}
    totals = {
        file: [account(entries, delta, *pair) for pair in UNITS_AND_RELATIONS]
        for file, entries in accounts.items()
    }
    if as_json:
        listed = {
            str(file): {
                "entries": [json.loads(entry.to_json()) for entry in entries],
                "spent": [_json(proofs) for proofs in totals[file]],
            }
            for file, entries in accounts.items()
        }
        print(json.dumps(listed))
        return
    out = Console(highlight=False)
    for file, entries in accounts.items():
        out.print(str(file), markup=False, soft_wrap=True)
        for number, entry in enumerate(entries, start=1):
            ask = "" if entry.kind == "training" else f" to ask {entry.query_id}"
            so_far = _text(account(entries[:number], delta, "record", "add_remove"))
            out.print(
                f"{entry.at} {entry.run or 'unnamed run'}: {entry.kind}{ask}, "
                f"{entry.queries:,} queries, {entry.digest[:12]}: so far {so_far}",
                markup=False,
                soft_wrap=True,
            )
        for proofs in totals[file]:
            notes = ", ".join(next(iter(proofs.values())).notes)
            out.print(f"spent: {_text(proofs)}; {notes}", soft_wrap=True)
        used = totals[file][0]["training"].number(5)
        out.print(f"a budget counts {used} (record, add_remove), by the training", soft_wrap=True)


def _json(proofs: Mapping["Basis", "Epsilon"]) -> dict[str, Any]:
    """Return the smaller of two proven epsilons as on a card, with the other beside it."""
    (basis, claim), (other, rest) = proofs.items()
    kept = {key: value for key, value in rest.to_json().items() if key in ("trust", "epsilon")}
    return claim.to_json() | {"basis": basis, "beside": {"basis": other} | kept}


def _text(proofs: Mapping["Basis", "Epsilon"]) -> str:
    """Return the smaller of two proven epsilons with the basis of its proof, and the other."""
    (basis, claim), (other, rest) = proofs.items()
    if claim.value == rest.value:  # no training is private
        return str(claim)
    return f"{claim} by the {basis}; by the {other} {rest.number(5)} (trust {rest.trust})"
