"""Tables and figures of attacks: every rate has its interval, and every epsilon its meaning."""

import csv

import numpy as np
import pytest

from fed_dpsd.errors import UserError
from fed_dpsd.report import attack
from fed_dpsd.report.figure import save

MEMBERS = {
    "setting": "proven, 1",
    "victim": "student",
    "attack": "lira",
    "accuracy": 0.75,
    "accuracy_deviation": 0.02,
    "auc": 0.512,
    "auc_deviation": 0.004,
    "tpr@1%": 0.0123,
    "tpr@1%_low": 0.009,
    "tpr@1%_high": 0.016,
    "resolved@1%": True,
    "cap@1%": 0.031,
    "profile_cap@1%": 0.027,
    "tpr@0.1%": 0.001,
    "tpr@0.1%_low": 0.0,
    "tpr@0.1%_high": 0.003,
    "resolved@0.1%": False,
    "cap@0.1%": 1.0,
    "profile_cap@0.1%": 1.0,
    "epsilon_at_least": None,
    "epsilon_proven": "0.99993",
    "epsilon_published": "inf",
}


def test_a_line_on_members_has_rates_with_intervals_and_both_caps():
    head, line = attack.membership_table([MEMBERS])
    cells = dict(zip(head[:3] + head[5:], line[:3] + line[5:], strict=True))
    assert line[3:5] == ["75.0 ± 2.0", "0.512 ± 0.004"]
    assert cells["TPR at 1 % FPR"] == "1.23 (0.90-1.60)"
    assert line[6] == "3.10; 2.70"
    assert cells["TPR at 0.1 % FPR"] == "0.10 (0.00-0.30), not resolved"
    assert line[8] == "none"
    assert line[9:] == ["-", "0.99993", "inf"]
    assert head[10] == "proven (record, add_remove)"
    _, line = attack.membership_table([MEMBERS | {"review": "not reviewed: of a plug-in"}])
    assert line[10] == "0.99993 (not reviewed)"


def test_a_line_on_pictures_leaves_out_what_a_control_has_not():
    score = {"inception": 5.0, "recognised": 0.5, "nearest_member": 0.52}
    row = score | {f"{name}_deviation": 0.1 for name in score}
    row |= {"setting": "random pixels", "victim": "", "attack": ""}
    row |= {"reached": np.nan, "reached_deviation": np.nan}
    _, line = attack.inversion_table([row])
    assert line == [
        "random pixels",
        *("-", "-"),
        "5.00 ± 0.10",
        "50.0 ± 10.0",
        "52.0 ± 10.0",
        *("-", "-", "-"),
    ]


def test_a_table_has_the_columns_of_all_rows(tmp_path):
    path = attack.write_table([{"a": 1}, {"a": 2, "b": 0.1}], tmp_path / "new" / "table.csv")
    assert list(csv.DictReader(path.open())) == [{"a": "1", "b": ""}, {"a": "2", "b": "0.1"}]
    page = attack.write_markdown([["x", "y"], ["1", "2"]], path.with_suffix(".md"))
    assert page.read_text() == "| x | y |\n| --- | --- |\n| 1 | 2 |\n"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="table.csv cannot be written .*; choose another folder"):
        attack.write_table([{"a": 1}], tmp_path / "file" / "table.csv")


def test_a_panel_for_each_victim_and_a_cap_only_where_there_is_one(tmp_path):
    rates = np.geomspace(1e-4, 1, 50)
    curves = [
        attack.Curve("student", "proven", rates, rates, np.minimum(1, 3 * rates)),
        attack.Curve("student", "in the clear", rates, rates**0.5, np.ones(50)),
        attack.Curve("teachers", "in the clear", rates, rates**0.5, np.ones(50)),
    ]
    figure = attack.draw_curves(curves)
    assert [ax.get_title() for ax in figure.axes] == ["student", "teachers"]
    assert [len(ax.lines) for ax in figure.axes] == [4, 2]  # with the line of guessing
    assert save(figure, tmp_path / "curves.png").stat().st_size > 1_000


def test_pictures_of_a_row_stand_side_by_side(tmp_path):
    grey, colour = np.zeros((10, 1, 8, 8), np.uint8), np.zeros((10, 3, 8, 8), np.uint8)
    figure = attack.draw_pictures([("digits", grey), ("photographs", colour)])
    assert [ax.get_ylabel() for ax in figure.axes] == ["digits", "photographs"]
    assert save(figure, tmp_path / "pictures.png").stat().st_size > 500
