"""The frame of a page: one file that needs no network, with a title, sections and links to them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fed_dpsd.report.markup import Content, Html, element, html, listed, paragraphs
from fed_dpsd.report.table import FIRST_LINE

STYLE, SCRIPT = Path(__file__).with_name("style.css"), Path(__file__).with_name("script.js")


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Args:
        name: identifies it in links.
        title: its heading.
        content: what it holds; a section without content is left out.
    """

    name: str
    title: str
    content: Content


def document(
    title: str,
    kind: str,
    lead: Content,
    sections: Iterable[Section],
    origin: Sequence[Content],
) -> str:
    """Return a page.

    Args:
        title: the heading, which says what the page is on.
        kind: what sort of report it is, in a few words.
        lead: the result, before everything else.
        sections: the rest.
        origin: what the numbers are from, at the end.
    """
    filled = [(each, content) for each in sections if (content := html(each.content))]
    links = (element("a", each.title, href=f"#{each.name}") for each, _ in filled)
    parts = (
        element(
            "section", element("h2", each.title, id=f"{each.name}-title"), content, id=each.name
        )
        for each, content in filled
    )
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(STYLE.read_text())),
    ]
    body = [
        element("a", "Skip to the result", href="#main", class_="skip"),
        element(
            "header",
            element("h1", title),
            element("p", kind, class_="kind"),
        ),
        element(
            "main", lead, element("nav", listed(links), aria_label="Sections"), parts, id="main"
        ),
        element("footer", paragraphs(*origin)),
        element("script", Html(SCRIPT.read_text())),
    ]
    whole = element("html", element("head", head), element("body", body), lang="en")
    return f"{FIRST_LINE}\n<!doctype html>\n{whole}\n"
