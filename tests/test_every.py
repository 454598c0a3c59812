"""The helper that runs a table as one test: every failing row is reported, and none hides one."""

import pytest

from tests.every import every


@every("a", [1, 2])
@every(("b", "c"), [(3, 4), (5, 6)])
def test_rows_of_two_tables_are_combined_in_folders_of_their_own(a, b, c, tmp_path, monkeypatch):
    assert b + 1 == c
    assert a in (1, 2)
    assert not list(tmp_path.iterdir())
    (tmp_path / "x").write_text("")
    assert not hasattr(pytest, "changed")
    monkeypatch.setattr(pytest, "changed", a, raising=False)


def test_every_row_that_fails_is_named():
    seen = []

    @every("value", ["good", "bad", "none", "worse"])
    def check(value):
        seen.append(value)
        if value == "none":
            with pytest.raises(ValueError):
                pass
        assert value == "good"

    with pytest.raises(BaseExceptionGroup, match="3 of 4 rows fail") as failed:
        check()
    notes = [note for error in failed.value.exceptions for note in error.__notes__]
    assert notes == [f"in row {n} of value: '{row}'" for n, row in
                     ((1, "bad"), (2, "none"), (3, "worse"))]  # fmt: skip
    assert len(seen) == 4
