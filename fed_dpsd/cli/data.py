"""The command `fed-dpsd data`: a data set, and its partition among simulated clients."""

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fed_dpsd.cli.console import Overrides, console


def data(overrides: Overrides = None) -> None:
    """Show split sizes, class counts per simulated client, and a picture of the partition."""
    import numpy as np

    from fed_dpsd.config import compose
    from fed_dpsd.experiment import load_data, partitions, set_up

    experiment = set_up(compose(overrides or []), Path.cwd())
    config = experiment.config
    loaded = load_data(config.data, config.cache)
    console.print(
        f"{config.data.name}: {len(loaded.train):,} to train, {len(loaded.test):,} to test, "
        f"{config.data.num_classes} classes, shape {list(config.data.shape)}; "
        f"partition {experiment.partition.name}, {config.num_clients} clients"
    )
    table = Table("client", "records", box=None, padding=(0, 1, 0, 0))
    for number in range(config.data.num_classes):
        table.add_column(str(number), justify="right")
    for client, part in enumerate(partitions(experiment)):
        counts = np.bincount(loaded.train.labels[part], minlength=config.data.num_classes)
        cells = (_cell(count, max(1, counts.max())) for count in counts)
        table.add_row(str(client), f"{len(part):,}", *cells)
    Console(highlight=False).print(table)


def _cell(count: int, largest: int) -> str:
    """Return a class count, shaded by its size relative to the client's largest class."""
    shade = " ░▒▓█"[min(4, math.ceil(4 * count / largest))]
    return f"{shade}{count}"
