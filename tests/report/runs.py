"""The facts of a made-up run and a made-up deployment, and a parser of pages."""

import dataclasses
import itertools
from html.parser import HTMLParser

import numpy as np
from PIL import Image

from fed_dpsd.report import figures
from fed_dpsd.report.facts import Facts

VOID = {"meta", "img", "br"}
ROW = {"trust": "nobody", "delta": 1e-5, "accountant": "gdp_exact", "notes": ["seeded noise"]}
ROW |= {"basis": "training", "beside": [], "queries": 640}
CARD = {
    **{"training": "dp_sgd", "answers": "label", "epsilon_stated": None, "unit": "record"},
    **{"epsilon_published": 10.0, "label": None, "colluding": None, "observers": []},
    **{"reason": "DP-SGD bounds one record"},
    "proven": [
        ROW | {"unit": unit, "relation": relation, "epsilon": epsilon, "spent": epsilon}
        for unit, relation, epsilon in (
            *(("record", "add_remove", 2.98795), ("record", "replace_one", 6.58276)),
            *(("patient", "add_remove", "inf"), ("patient", "replace_one", "inf")),
            *(("client", "add_remove", "inf"), ("client", "replace_one", "inf")),
        )
    ],
}
SUMMARY = {
    **{"status": "completed", "error": None, "method": "fed_dpsd", "data": "digits"},
    **{"num_clients": 3, "seed": 0, "engine": "local", "student_sha256": "ab12"},
    "accuracy": {
        **{"student": 0.75, "ensemble": 0.9, "weighted_ensemble": None, "vote": 0.85},
        **{"clients": [0.5, 0.6, None], "covered_by_epsilon": True},
        "evaluated_on": "40 test images of digits, taken as public in a simulation",
    },
    "auroc": {"student": 0.8, "ensemble": 0.9, "weighted_ensemble": None, "clients": [0.7, 0.8, 1]},
    "confusion": [[18, 2], [8, 12]],
    "calibration": {
        **{"error": 0.125, "count": [0, 0, 0, 0, 0, 10, 0, 0, 30, 0]},
        "confidence": [0, 0, 0, 0, 0, 0.55, 0, 0, 0.875, 0],
        "accuracy": [0, 0, 0, 0, 0, 0.4, 0, 0, 0.8667, 0],
    },
    "queries": {
        **{"answered_per_client": 640, "forward_answers": 1920, "backward_answers": 0},
        **{"bytes_to_clients": 3_000_000, "bytes_to_server": 1_920},
    },
    "privacy": CARD,
    "diagnostics": {"records_of_largest_client": 500},
    "seconds": {"total": 12.0, "teachers": 4.0, "rounds": 8.0},
}
VERDICT = ("epsilon 2.99 for a record added or removed, 6.59 for one replaced, delta 1e-05",)


def run(folder, **changes):
    """The facts of a run of five rounds; `changes` are of the facts."""
    picture = np.random.default_rng(0).integers(0, 255, (2 + 2 * 10, 2 + 8 * 10), np.uint8)
    path = folder / "round_00001.png"
    Image.fromarray(picture).convert("RGB").save(path)
    rounds = [
        {
            **{"round": n, "rounds": 5, "student_accuracy": 0.15 * n, "agreement": 0.1 * n},
            **{
                "answered_queries": 128 * n,
                "refused": {"1": "the budget is spent"} if n > 4 else {},
            },
        }
        for n in range(1, 6)
    ]
    facts = Facts(
        name="a-run",
        summary=SUMMARY,
        rounds=rounds,
        versions={"commit": "abc", "machine": "m", "fed-dpsd": "0.1.0", "torch": "2"},
        settings={"rounds": 5, "seed": 0, "answers.k": None, "data.name": "digits"},
        classes=("healthy", "ill <1>"),
        simulated=True,
        meaningful=True,
        verdict=VERDICT,
        trained="DP-SGD: 100 steps",
        answered="a label for each image",
        published="epsilon published (no guarantee): 10",
        command="fed-dpsd run rounds=5 'model.teachers=[cnn, mlp]'",
        spent=[{0: 0.5 * n, 1: 0.5 * n, 2: 0.25 * n} for n in range(1, 6)],
        costs={0: 2.5, 1: 2.5, 2: 1.25},
        samples={1: path, 5: path},
        hospitals=("hospital 0", "hospital 1 (St <Mary>)", "hospital 2"),
    )
    return dataclasses.replace(facts, **changes)


def deployment(folder, **changes):
    """The facts of a deployment in which hospital 1 was late, refused and was restored."""
    sent = {"kind": "answers", "ask": "aa", "at": "2026-11-25T08:52:23Z", "seconds": 1.5}
    late = {"1": "no answer in time"}
    requests = [
        sent | {"kind": "counts", "query_id": 0, "answered": [0, 1, 2], "refused": {}},
        sent | {"query_id": 1, "answered": [0, 1, 2], "refused": {}},
        sent | {"query_id": 2, "answered": [0, 2], "refused": late, "seconds": 20.0},
        sent | {"query_id": 3, "answered": [0, 2], "refused": late},
        sent | {"query_id": 3, "answered": [0, 1, 2], "refused": {}},
        sent | {"query_id": 4, "answered": [0, 2], "refused": {"1": "the budget is <spent>"}},
    ]
    statement = {"charged": {"dp_sgd": 1, "label": 512}, "forgotten": {}, "changed": 0}
    restored = statement | {"forgotten": {"label": 128}, "changed": 1}
    proven = [{k: v for k, v in row.items() if k != "spent"} for row in CARD["proven"]]
    proven = [row | {"notes": ["per run"]} for row in proven]
    accuracy = SUMMARY["accuracy"] | {"clients": None, "ensemble": None, "student": None}
    summary = SUMMARY | {
        **{"accuracy": accuracy | {"evaluated_on": "nothing: there are no test images"}},
        **{"privacy": CARD | {"proven": proven}, "confusion": None, "calibration": None},
    }
    facts = run(
        folder,
        summary=summary,
        simulated=False,
        requests=requests,
        charges={"clients": {"0": statement, "1": restored, "2": statement}},
    )
    return dataclasses.replace(facts, **changes)


def leave_figures_empty(monkeypatch):
    """Draw nothing; each figure takes a tenth of a second."""
    for name in ("draw", "draw_dots"):
        monkeypatch.setattr(figures, name, lambda charts, *_: charts or None)
    monkeypatch.setattr(figures, "save", lambda figure, path: path)
    monkeypatch.setattr(figures, "to_svg", lambda figure, name: ("0 0 1 1", ""))


class Page(HTMLParser):
    """A page's elements in their order, each with its attributes, its text and its parents."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, names)
        found = {"tag": tag, "text": "", "parents": list(self._open), **dict(attributes)}
        self.elements.append(found)
        if tag not in VOID:
            self._open.append(found)

    def handle_endtag(self, tag):
        assert self._open[-1]["tag"] == tag, f"{tag} closes {self._open[-1]}"
        self._open.pop()

    def handle_data(self, text):
        for element in self._open:
            element["text"] += text.replace("\xa0", " ")

    def all(self, tag, **attributes):
        """The elements of a tag with these attributes; `class_` is a word of the class."""
        kind = attributes.pop("class_", "")
        return [
            each
            for each in self.elements
            if each["tag"] == tag
            and (not kind or kind in (each.get("class") or "").split())
            and all(each.get(name) == value for name, value in attributes.items())
        ]

    def texts(self, tag, **attributes):
        """The texts of these elements, each on one line."""
        return [" ".join(each["text"].split()) for each in self.all(tag, **attributes)]

    def text_of(self, tag, **attributes):
        (found,) = self.texts(tag, **attributes)
        return found

    def rows(self, caption):
        """The rows of the table whose caption holds some text, as dictionaries by its header."""
        for table in self.all("table"):
            inside = [each for each in self.elements if table in each["parents"]]
            (title,) = [each for each in inside if each["tag"] == "caption"]
            if caption in title["text"]:
                break
        else:
            raise AssertionError(f"no table on {caption}")
        lines = [each for each in inside if each["tag"] == "tr"]
        header, *rows = [
            [e["text"] for e in inside if e["tag"] in ("th", "td") and line in e["parents"]]
            for line in lines
        ]
        return [dict(zip(header, row, strict=True)) for row in rows]


def check_structure(text):
    """Assert what holds of every page, and return it parsed."""
    page = Page(text)
    assert page.all("html")[0]["lang"] == "en"
    title = next(e for e in page.all("title") if e["parents"][-1]["tag"] == "head")["text"]
    assert title == page.text_of("h1")
    assert page.all("meta", name="viewport")
    ids = [each["id"] for each in page.elements if each.get("id")]
    assert len(ids) == len(set(ids))
    assert page.all("a")[0]["href"] == "#main"
    for link in page.all("a"):
        assert link["href"].removeprefix("#") in ids
    levels = [int(e["tag"][1]) for e in page.elements if e["tag"] in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    for before, after in itertools.pairwise(levels):
        assert after <= before + 1
    for table in page.all("table"):
        inside = [each for each in page.elements if table in each["parents"]]
        assert [each for each in inside if each["tag"] == "caption" and each["text"].strip()]
        assert all(each["scope"] in ("row", "col") for each in inside if each["tag"] == "th")
        assert all(each["text"].strip() for each in inside if each["tag"] == "th")
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        inside = [each for each in page.elements if svg in each["parents"]]
        named = {each["id"]: each["text"] for each in inside if each.get("id")}
        assert all(named[name].strip() for name in svg["aria-labelledby"].split())
    for image in page.all("img"):
        assert image["alt"]
        assert image["src"].startswith("data:image/png;base64,")
    assert not page.all("link")
    assert not [script for script in page.all("script") if "src" in script]
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert "url(" not in text.replace("url(#", "")
    assert text.count("<script") == text.count("<style") == 1
    assert len(text.encode()) < 2_000_000
    return page
