"""The commands `fed-dpsd site`: a hospital's own, and the coordinator's `list` and `revoke`.

Of a hospital's, only `serve` connects to a coordinator.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fed_dpsd.cli.console import OVERRIDE, console
from fed_dpsd.errors import UserError
from fed_dpsd.progress import PlainConsole, show_progress, table_of

if TYPE_CHECKING:
    from fed_dpsd.server.attendance import Member

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,  # click does
    help="For hospitals: create the file and the key, check the data, and connect. For the "
    "coordinator: list and revoke hospitals.",
)
File = Annotated[
    Path,
    typer.Argument(help="The hospital's file, as written by `fed-dpsd site init`.", metavar="FILE"),
]
Run = Annotated[Path, typer.Argument(help="The run folder, at the coordinator.", metavar="RUN")]
Connection = Annotated[str, typer.Option(help="The SuperLink's name in Flower's configuration.")]


def init(file: File) -> None:
    """Write a template of a hospital's file, with a comment on each key.

    Its state folder is named after the file, so one folder may hold several hospitals' files.

    Example: fed-dpsd site init site.yaml

    Read on: docs/deployment.md
    """
    from fed_dpsd.storage import conf_folder, to_utf8, write_atomically

    if file.exists():
        raise UserError(f"{file} already exists; it is not overwritten")
    if not file.parent.exists():
        raise UserError(f"{file.parent} does not exist; create it, or give another folder")
    template = (conf_folder() / "site.yaml").read_text()
    if file.stem != "site":
        template = template.replace(
            "\nstate: state\n", f"\nstate: {json.dumps(f'{file.stem}-state')}\n"
        )
    write_atomically(file, to_utf8(template))
    print(file.absolute())


def key(file: File) -> None:
    """Print this hospital's public key for secure sums, for the other hospitals' files.

    Example: fed-dpsd site key site.yaml

    Read on: docs/deployment.md
    """
    from fed_dpsd.accounts.secret import exchange_key, load_or_create_secret
    from fed_dpsd.client.hospital import open_hospital
    from fed_dpsd.privacy.secure_sum import public_key

    print(
        public_key(exchange_key(load_or_create_secret(open_hospital(file).folder / "secret"))).hex()
    )


def check(
    file: File,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="All settings of the coordinator's run (KEY=VALUE). Default: the first choices in "
            "the file.",
            click_type=OVERRIDE,
        ),
    ] = None,
) -> None:
    """Count the data, train and test a teacher, and rehearse an answer; nothing is charged.

    The output is exact and private: only the hospital may see it.

    Example: fed-dpsd site check site.yaml

    Read on: docs/deployment.md
    """
    from fed_dpsd.client.check import check
    from fed_dpsd.client.hospital import open_hospital

    out, lines = PlainConsole(), check(open_hospital(file), overrides or [])

    def next_line() -> str | Table | None:
        with show_progress(console):  # bars end before a line is printed
            return next(lines, None)

    for line in iter(next_line, None):
        out.print(line, soft_wrap=isinstance(line, str))


def serve(
    file: File,
    superlink: Annotated[str, typer.Option(help="The coordinator's SuperLink, HOST:PORT.")],
    certificate: Annotated[Path, typer.Option(help="Certificate of the coordinator's CA.")],
    node_key: Annotated[Path, typer.Option(help="This node's private key, in OpenSSH format.")],
    port: Annotated[
        int | None,
        typer.Option(
            help="Port on this machine, for the node's own processes. Default: any free one."
        ),
    ] = None,
) -> None:
    """Connect to the coordinator, and answer only with the code installed here.

    The console shows a line for each request: what was requested, charged or refused, and the
    budget left. A node that ends by itself is restarted. After a crash, the SuperLink takes up to a
    minute to notice that the old node is gone, and refuses a new one until then.

    Example: fed-dpsd site serve site.yaml --superlink fl.example.org:443 --certificate ca.crt
        --node-key node_key

    Read on: docs/deployment.md
    """
    from fed_dpsd.client.hospital import open_hospital
    from fed_dpsd.engines.flower.supernode import serve

    for path in (certificate, node_key):
        if not path.is_file():
            raise UserError(f"{path} does not exist; see docs/deployment.md")
    serve(file, open_hospital(file).folder, superlink, certificate, node_key, port)


def list_(run: Run, connection: Connection = "federation") -> None:
    """List a run's hospitals and all registered nodes, at the coordinator.

    Hospitals state their own names and numbers; Flower knows nodes by their keys alone.

    Example: fed-dpsd site list runs/NAME

    Read on: docs/deployment.md
    """
    from fed_dpsd.engines.flower.nodes import node_states
    from fed_dpsd.server.attendance import last_answers

    members, states = _members(run), node_states(connection)
    answers = last_answers(run)
    table = table_of("number", "hospital", "node", "state", "last answer (UTC)")
    for number, member in sorted(members.items()):
        state, last = states.pop(member.node, "unknown"), answers.get(number, "-")
        table.add_row(str(number), member.name or "-", str(member.node), state, last)
    for node, state in states.items():
        if state != "unregistered":
            table.add_row("-", "-", str(node), state, "-")
    PlainConsole().print(table)


def revoke(
    run: Run,
    hospital: Annotated[str, typer.Argument(help="Its number or name.", metavar="HOSPITAL")],
    connection: Connection = "federation",
) -> None:
    """Unregister a hospital's node, at the coordinator: its key can no longer connect.

    Answers that the hospital has sent stay in the run, which does not wait for it any more.

    Example: fed-dpsd site revoke runs/NAME "St Mary's"

    Read on: docs/deployment.md
    """
    from fed_dpsd.engines.flower.nodes import unregister
    from fed_dpsd.server.attendance import hospital_text, store_revoked

    members = _members(run)
    # No name is a number.
    found = [n for n, member in members.items() if hospital in (str(n), member.name or None)]
    if len(found) != 1:
        known = hospital_text(members, *members)
        raise UserError(f"{hospital!r} names {len(found)} hospitals of {run}; it has {known}")
    (number,) = found
    unregister(members[number].node, connection)
    store_revoked(run, members[number].node)
    print(f"{hospital_text(members, number)}: node {members[number].node} is unregistered")


def _members(run: Path) -> "dict[int, Member]":
    from fed_dpsd.server.attendance import FILE, members_of

    if not (members := members_of(run)):
        raise UserError(f"{run} has no {FILE}: no hospital has connected to a run in this folder")
    return members
