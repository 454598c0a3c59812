"""The command `fed-dpsd data`: a data set, and its partition among simulated clients."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fed_dpsd.cli.console import Overrides, console, importing
from fed_dpsd.errors import UserError, format_value, printable
from fed_dpsd.progress import PlainConsole, show_progress

if TYPE_CHECKING:
    from fed_dpsd.data.intake import Records


def data(
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="PNG file for a picture of the partition.")
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(help="PNG file for a few test images, scaled.")
    ] = None,
) -> None:
    """Show the sizes of the splits, and each simulated client's number of records by class.

    Example: fed-dpsd data partition.alpha=0.1

    Read on: docs/extending.md
    """
    import numpy as np

    for option, path, name in (("out", out, "partition"), ("sheet", sheet, "sheet")):
        if path is not None and (path.suffix.lower() != ".png" or path.is_dir()):
            raise UserError(f"--{option} {path} must end in .png, as in {name}.png")
    with importing():
        from fed_dpsd.api import experiment_of
        from fed_dpsd.experiment import contact_sheet, load_data, partitions, unused_records
        from fed_dpsd.needs import needs_of, require_room

    with show_progress(console):
        experiment = experiment_of(overrides or ())
        config = experiment.config
        require_room(experiment, count=True)
        loaded = load_data(config.data, config.cache)
    labels, names = loaded.train.labels, tuple(map(printable, config.data.class_names))
    counts = np.stack(
        [np.bincount(labels[part], minlength=len(names)) for part in partitions(experiment)]
    )
    print(
        f"{config.data.name}: {'; '.join(loaded.counts)}\n"
        f"{config.data.name}: {_size(loaded.train)} to train, {_size(loaded.test)} to test, "
        f"{len(names)} classes, shape {list(config.data.shape)}; "
        f"partition {experiment.partition.name}, {config.num_clients} clients"
    )
    if config.data.resize:
        print(f"fit: {config.data.fit}; window: {format_value(config.data.window)}")
    table = Table("client", "records", box=None, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right")
    for client, row in enumerate(counts):
        table.add_row(str(client), f"{row.sum():,}", *map(str, row))
    # In a pipe, lines may have any length.
    PlainConsole(width=None if sys.stdout.isatty() else 100_000).print(table)
    if left_out := unused_records(experiment):
        print(left_out)
    print(needs_of(experiment, len(loaded.train)))
    if out is None and sheet is None:
        return
    from fed_dpsd.report import figures, plots

    if out is not None:
        print(figures.save(plots.draw_partition(counts, names), out.absolute()))
    if sheet is not None:
        seen = {names[k]: images for k, images in contact_sheet(experiment, loaded.test).items()}
        if not seen:
            raise UserError(f"--sheet {sheet}: there is no test image that is not a training image")
        print(figures.save(plots.draw_sheet(seen), sheet.absolute()))


def _size(records: "Records") -> str:
    from fed_dpsd.errors import counted

    patients = records.num_patients
    if patients is None:
        return f"{len(records):,}"
    return f"{len(records):,} ({counted(patients, 'patient')})"
