"""Tables as `fed-dpsd sweep` writes them, without a sweep."""

import csv
import functools

import pytest

RUN = {
    **{"data": "mnist", "num_classes": 10, "mechanism": "label", "teachers_per_client": 1},
    **{"student": 0.5, "ensemble": 0.9, "record_add_remove": 2, "record_replace_one": 4},
    **{"patient_add_remove": "inf", "client_add_remove": 8, "delta": 1e-5, "trust": "nobody"},
    **{"commit": "abc", "machine": "m", "rounds": 20},
}


def write_table(folder, *changes, name="curve.csv", without=()):
    """Write rows, each RUN with changes, and its own key unless given."""
    rows = [{"key": f"{name}{n}", "seed": n} | RUN | change for n, change in enumerate(changes)]
    columns = list(dict.fromkeys(c for row in rows for c in row if c not in without))
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


@pytest.fixture
def table(tmp_path):
    return functools.partial(write_table, tmp_path)
