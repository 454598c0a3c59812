"""Paired differences, against scipy's own test."""

import re

import pytest
from scipy.stats import ttest_rel

from fed_dpsd.errors import UserError
from fed_dpsd.report import pages
from fed_dpsd.report.paired import rows
from fed_dpsd.report.settings import read

FIRST, SECOND = (0.70, 0.90, 0.80), (0.75, 0.92, 0.86)


def runs(grid, students, **more):
    return [
        {"grid": grid, "seed": seed, "student": student} | more
        for seed, student in enumerate(students)
    ]


def numbers(cell):
    return [float(number) for number in re.findall(r"[+-][\d.]+", cell)]


def test_an_interval_is_that_of_a_paired_test(table):
    """An unpaired one, over students this far apart, would be three times as wide."""
    path = table(*runs("first", FIRST), *runs("second", SECOND))
    header, (name, cell, seeds) = rows(read([path]), "first")
    assert (header, name, seeds) == (["minus first", "student", "seeds"], "second", "3")
    test = ttest_rel(SECOND, FIRST)
    low, high = test.confidence_interval(0.95)
    mean = sum(SECOND) / 3 - sum(FIRST) / 3
    assert numbers(cell) == pytest.approx([100 * mean, 100 * low, 100 * high], abs=0.05)
    back = rows(read([path]), "second")[1][1]
    assert numbers(back)[0] == pytest.approx(-numbers(cell)[0])


def test_only_seeds_that_both_have_are_compared(table):
    """In whatever order their rows are."""
    path = table(*runs("first", FIRST), *reversed(runs("second", (*SECOND[:2], 0.1))[:2]))
    _, (_, cell, seeds) = rows(read([path]), "first")
    assert seeds == "2"
    assert numbers(cell)[0] == pytest.approx(3.5)


def test_one_common_seed_has_no_interval_and_none_no_difference(table):
    one = table(*runs("first", FIRST), *runs("second", SECOND[:1]))
    assert rows(read([one]), "first")[1] == ["second", "+5.0", "1"]
    none = table(*runs("first", FIRST[:1]), {"grid": "second", "seed": 5, "student": 0.5})
    assert rows(read([none]), "first")[1] == ["second", "", "0"]


def test_two_classes_are_compared_by_area_too(table):
    two = {"num_classes": 2, "auroc_student": 0.9}
    path = table(*runs("first", FIRST, **two), *runs("second", SECOND, **two | {"seed": 0})[:1])
    header, row = rows(read([path]), "first")
    assert header == ["minus first", "student", "auroc_student", "seeds"]
    assert row[2] == "+0.0"


def test_an_unknown_setting_is_an_error_that_names_the_known(table, tmp_path):
    path = table(*runs("first", FIRST), *runs("second", SECOND))
    with pytest.raises(UserError, match="--against='third' is no .*; give one of: first; second"):
        list(pages.write([path], tmp_path, "third"))
    assert not (tmp_path / "curve.md").exists()


def test_both_pages_have_the_differences_only_if_asked(table, tmp_path):
    path = table(*runs("first", FIRST), *runs("second", SECOND))
    for against in ("first", None):
        list(pages.write([path], tmp_path, against))
        for page in ("curve.md", "curve.html"):
            assert ("minus first" in (tmp_path / page).read_text()) == (against is not None)
