"""Classes and their order. Only this module turns the text of a label into a number."""

import functools
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
TRUTH = ("false", "true")
# Spellings of a missing label or patient, in lower case. A lone - may be a negative result.
MISSING = {
    *("", "?", ".", "-nan", "na", "n/a", "n.a.", "#n/a", "#na", "nan", "nat", "nil", "none"),
    *("null", "(null)", "<na>", "<null>", r"\n", "--", "---", "\u2013", "\u2014"),
    *("#n/a n/a", "#value!", "#ref!", "#name?", "#num!", "#div/0!", "#null!"),  # Excel's errors
}
LISTING = "|;,\u3001\uff1b\uff0c\uff5c"  # characters between several findings in a cell
# These are also common within a name.
OFTEN_LISTING = (*LISTING, "/", "+", "&", "\uff0f", " and ", " und ", " et ", " y ")
# Replacements by category: shapeless characters, dashes and quotes. Some others have no shape, too.
LOOKS = {"Cc": "", "Cf": "", "Pd": "-", "Pi": "'", "Pf": "'"}
SHAPELESS = "\u034f\u115f\u1160\u2800" + "".join(map(chr, range(0xFE00, 0xFE10)))
MINUS = "\u2212"


def text_of(value: Any) -> str:
    """Return the text of a label or an id; "" if the cell is empty (None, NaN or spaces).

    Formats store one value as a number, a boolean, bytes or text. The text is the same for
    all of them: 1.0 is "1", True is "true", and letters with accents have one spelling (NFC).
    """
    if callable(item := getattr(value, "item", None)):  # a NumPy scalar
        value = item()
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    text = unicodedata.normalize("NFC", str(value)).strip()
    if re.fullmatch(r"[+-]?[0-9]+\.0+", text):
        text = text.partition(".")[0]
    return text.lower() if text.lower() in TRUTH else text


def is_missing(text: str) -> bool:
    """Return whether the text of a cell, from `text_of`, spells a missing value."""
    return text.casefold() in MISSING or look_of(text).casefold() in MISSING


def look_of(text: str) -> str:
    """Return a text that is the same for all texts that look the same.

    Shapeless characters are dropped; compatible characters (NFKC), dashes, quotes and spaces have
    one spelling. Letters of different alphabets stay different.
    """
    letters = unicodedata.normalize("NFKC", " ".join(text.split())).replace(MINUS, "-")
    looks = (LOOKS.get(unicodedata.category(c), c) for c in letters if c not in SHAPELESS)
    return " ".join("".join(looks).split())


def look_alikes(texts: Iterable[str]) -> str:
    """Name two texts that look the same, with their code points; "" if there are none."""
    looks: dict[str, str] = {}
    for text in texts:
        if (first := looks.setdefault(look_of(text), text)) != text:
            return f"{first!a} and {text!a} look the same"
    return ""


def holds_several(label: str, names: Collection[str]) -> bool:
    """Return whether a label lists several of the names, as in "Effusion|Mass"."""
    if not any(each in label for each in OFTEN_LISTING):
        return False
    known = {_bare(name) for name in names}
    lists = ([_bare(part) for part in label.split(each)] for each in OFTEN_LISTING)
    return any(len(parts) > 1 and known.issuperset(parts) for parts in lists)


@functools.lru_cache(maxsize=100_000)
def _bare(text: str) -> str:
    """Return a label without case and without the spaces, quotes and brackets around it."""
    return text_of(text.strip(" \t'\"()[]{}")).casefold()


def seems_several(label: str) -> bool:
    """Return whether a label may list several findings, whether or not these are labels."""
    return any(each in label for each in LISTING)


def sort_class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names in order: numbers by value, then other names."""

    def place(name: str) -> tuple[bool, float, str]:
        number = bool(NUMBER.fullmatch(name))
        return not number, float(name) if number else 0.0, name

    return tuple(sorted(set(names), key=place))


def default_class_names(number: int) -> tuple[str, ...]:
    """Return the names of unnamed classes: "0", "1", ..."""
    return tuple(map(str, range(number)))


def label_numbers(
    classes: Sequence[str],
    labels: Mapping[str, str] | None = None,
    declared: Sequence[str] = (),
) -> dict[str, int]:
    """Map the text of each accepted label to the position of its class.

    Args:
        classes: the names of the classes, in their order.
        labels: the class name of each label; no other labels are accepted. With None, the class
            names are the labels; so are the positions if no name is a number, and booleans if there
            are two classes.
        declared: names that a table declares, in its own order. They are the labels if `classes`
            are only numbers.
    """
    numbers = {text_of(name): number for number, name in enumerate(classes)}
    if labels is not None:
        return {text_of(label): numbers[text_of(name)] for label, name in labels.items()}
    others: Sequence[str] = ()
    if not any(map(NUMBER.fullmatch, numbers)):
        others = default_class_names(len(classes))
    elif tuple(classes) == default_class_names(len(classes)) and len(declared) == len(classes):
        others = list(map(text_of, declared))
    known = {text: number for number, text in enumerate(others)} | numbers
    if len(classes) == len(TRUTH) and not known.keys() & set(TRUTH):
        known |= {text: number for number, text in enumerate(TRUTH)}
    return known
