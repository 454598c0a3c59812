"""Hooks of the documentation site: generated pages, links that leave docs/, and navigation.

Links in docs lead to files of the repository, as on GitHub. The site replaces them by the page of a
Markdown file, or by a page that shows the source.
"""

import itertools
import json
import logging
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import examples
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[2]
LOG = logging.getLogger("mkdocs.hooks.site")
OUTSIDE = {  # Markdown files outside docs/, and their pages
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
_TARGET = re.compile(r"(\]\(|(?:src|href)=\")([^)\s\"]+)(?=[)\"])")
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def page_of(path: str) -> str:
    """Return the page of the site that shows a file of the repository.

    Args:
        path: the file, from the repository's root, such as "docs/privacy.md".
    """
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("results/"):
        return path
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", "_notebook.md", path.removeprefix("docs/"))
    return f"source/{path}.md"


def targets(text: str, origin: str) -> Iterator[tuple[re.Match[str], str, str]]:
    """Yield each link to a file of the repository: its match, the file, and "#" and the anchor.

    Args:
        text: a page in Markdown.
        origin: the file that holds it, from the repository's root.
    """
    for match in _TARGET.finditer(text):
        path, sharp, anchor = match[2].partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if path and ":" not in path and (ROOT / file).is_file():
            yield match, file, sharp + anchor


def rewritten(text: str, origin: str) -> str:
    """Return a page whose links to files of the repository lead to pages of the site."""
    folder, parts, end = posixpath.dirname(page_of(origin)) or ".", [], 0
    for match, file, anchor in targets(text, origin):
        link = posixpath.relpath(page_of(file), folder)
        parts += [text[end : match.start()], match[1], link, anchor]
        end = match.end()
    return "".join([*parts, text[end:]])


def source_page(path: str) -> str:
    """Return a page with a file's text, whose lines have the anchors that they have on GitHub."""
    text = (ROOT / path).read_text()
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    shown = highlight(text, lexer, HtmlFormatter(linenos="inline", linespans="L", wrapcode=True))
    shown = re.sub(r'<span id="L-(\d+)">', r'<span id="L\1">', shown)
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n{shown}\n"


def notebook_page(path: str) -> str:
    """Return a page with the cells of a notebook, and the outputs that are kept in it."""
    name = PurePosixPath(path).name
    parts = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(rewritten(source, path))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/svg+xml" in data:
                parts.append("".join(data["image/svg+xml"]))
            elif "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![The figure that this cell draws](data:image/png;base64,{image})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    title, _, text = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n[Download this notebook]({name})\n{text}\n"


def _pages() -> list[Path]:
    """Return the pages of docs/ and results/."""
    return [path for folder in ("docs", "results") for path in (ROOT / folder).rglob("*.md")]


def made_pages() -> Iterator[tuple[str, str]]:
    """Yield each page that is made, and its text."""
    for path, page in OUTSIDE.items():
        yield page, rewritten((ROOT / path).read_text(), path)
    for file in sorted((ROOT / "docs").rglob("*.ipynb")):
        path = file.relative_to(ROOT).as_posix()
        yield page_of(path), notebook_page(path)
    yield from reference.pages()
    linked = set()
    for file in [*_pages(), *(ROOT / path for path in OUTSIDE)]:
        origin = file.relative_to(ROOT).as_posix()
        linked |= {path for _, path, _ in targets(file.read_text(), origin)}
    for path in sorted(linked):
        if page_of(path).startswith("source/"):
            yield page_of(path), source_page(path)


def expanded(nav: Sequence[Any], pages: Iterable[str]) -> list[Any]:
    """Return a nav in which each pattern is the pages that fit it and that no other line names."""
    left = sorted(set(pages) - set(_named(nav)))

    def expand(items: Sequence[Any]) -> Iterator[Any]:
        for item in items:
            if isinstance(item, dict):
                ((title, below),) = item.items()
                yield {title: below if isinstance(below, str) else list(expand(below))}
            elif "*" in item:
                depth = item.count("/")
                fitting = [p for p in left if fnmatch(p, item) and p.count("/") == depth]
                left[:] = [page for page in left if page not in fitting]
                yield from fitting
            else:
                yield item

    return list(expand(nav))


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(item)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and complete the nav."""
    for page, text in itertools.chain(made_pages(), examples.pages()):
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / "results").glob("*.*")):
        if path.suffix != ".html":  # written by `fed-dpsd report`
            own = path.relative_to(ROOT).as_posix()
            files.append(File(own, str(ROOT), config.site_dir, use_directory_urls=False))
    config.nav = expanded(config.nav or [], (file.src_uri for file in files.documentation_pages()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page of docs/ lead to pages of the site."""
    if page.file.generated_by:
        return markdown
    origin = page.file.src_uri
    return rewritten(markdown, origin if origin.startswith("results/") else f"docs/{origin}")


def on_post_build(*, config: MkDocsConfig) -> None:
    """Warn of every page that would load something from the network."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for loaded in _LOADED.findall(page.read_text()):
            LOG.warning("%s loads from the network: %s", page.relative_to(config.site_dir), loaded)
