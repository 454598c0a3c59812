"""Tables of cheap cases as one test, which reports every failing row."""

import functools
import inspect

import pytest


def every(names, rows, ids=None):
    """Run a test for each row of a table, as `pytest.mark.parametrize` does, but as a single case.

    Each row has its own `monkeypatch` and `tmp_path`; all other fixtures are shared.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(rows)
    assert rows, "a table without rows tests nothing"

    def decorate(test):
        def whole(**fixtures):
            failed = []
            for number, row in enumerate(rows):
                values = dict(zip(names, row if len(names) > 1 else (row,), strict=True))
                if "tmp_path" in fixtures:
                    values["tmp_path"] = fixtures["tmp_path"] / f"{number}"
                    values["tmp_path"].mkdir()
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in fixtures:
                        values["monkeypatch"] = patch
                    try:
                        test(**fixtures | values)
                    except (Exception, pytest.fail.Exception) as error:
                        error.add_note(f"in row {number} of {', '.join(names)}: {row!r:.500}")
                        failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(rows)} rows fail", failed)

        functools.update_wrapper(whole, test)
        del whole.__wrapped__  # pytest would follow it to the names of the rows' values
        parameters = inspect.signature(test).parameters.values()
        kept = [each for each in parameters if each.name not in names]
        whole.__signature__ = inspect.Signature(kept)
        return whole

    return decorate
