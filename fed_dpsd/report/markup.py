"""HTML as text that is escaped once: elements, tables that reflow on a phone, folded details."""

import re
from collections.abc import Iterable, Sequence
from html import escape, unescape
from typing import Any

VOID = {"img", "meta", "br"}


class Html(str):
    """Text that is HTML already, so that it is not escaped again."""

    __slots__ = ()


Content = str | Iterable[str]


def html(content: Content) -> Html:
    """Return content as HTML: plain text is escaped, and its backticks become code elements.

    A number such as 1e-05, and one with its percent sign, stays on one line.
    """
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        text = re.sub(r"\b(\de-\d+)\b", r'<span class="whole">\1</span>', escape(content))
        text = re.sub(r"(\d) %", "\\1\u00a0%", text)
        return Html(re.sub(r"`([^`]*)`", r"<code>\1</code>", text))
    return Html("".join(map(html, content)))


def plain(content: Content) -> str:
    """Return the text of content, without its elements."""
    return unescape(re.sub(r"<[^>]*>", "", html(content)))


def element(tag: str, *children: Content, **attributes: Any) -> Html:
    """Return an element; `class_` stands for class, an underscore inside a name for a hyphen.

    An attribute of None or False is left out, and one of True has no value.
    """
    given = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        given.append(f" {name}" if value is True else f' {name}="{escape(str(value))}"')
    start = f"<{tag}{''.join(given)}>"
    return Html(start if tag in VOID else f"{start}{html(children)}</{tag}>")


def paragraphs(*texts: Content) -> Html:
    """Return a paragraph for each text that says something."""
    return html(element("p", text) for text in texts if text)


def listed(texts: Iterable[Content], **attributes: Any) -> Html:
    """Return an unordered list."""
    return element("ul", (element("li", text) for text in texts), **attributes)


def terms(pairs: Iterable[tuple[Content, Content]], **attributes: Any) -> Html:
    """Return a list of terms, each with what is said of it."""
    rows = (element("div", element("dt", term), element("dd", said)) for term, said in pairs)
    return element("dl", rows, **attributes)


def folded(title: Content, *content: Content, paper: bool = True) -> Html:
    """Return details that open on demand; on paper they are open, or with `paper` off left out."""
    kind = None if paper else "screen"
    return element("details", element("summary", title), content, class_=kind)


def table(
    caption: Content,
    header: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    wide: bool = False,
) -> Html:
    """Return a table whose first column names the row.

    On a narrow screen each row becomes a card with the column's title beside every cell. A `wide`
    one, such as a matrix, scrolls in a region of its own instead.

    Args:
        caption: what the table shows.
        header: the columns' titles.
        rows: cells, as many as there are titles.
        wide: whether the rows make sense only below each other.
    """
    titles = list(map(plain, header))
    heads = (element("th", title, scope="col", role="columnheader") for title in header)
    lines = [element("tr", heads, role="row")]
    body = []
    for first, *others in rows:
        cells = [element("th", first, scope="row", role="rowheader")]
        for title, cell in zip(titles[1:], others, strict=True):
            cells.append(element("td", element("span", cell), role="cell", data_label=title))
        body.append(element("tr", cells, role="row"))
    whole = element(
        "table",
        element("caption", caption),
        element("thead", lines, role="rowgroup"),
        element("tbody", body, role="rowgroup"),
        role="table",
        class_="wide" if wide else "cards",
    )
    if not wide:
        return whole
    label = plain(caption)
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=label)
