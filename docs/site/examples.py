"""What a run leaves, as pages to click: a small run is made whenever the site is built."""

import functools
import tempfile
from collections.abc import Iterator

import fed_dpsd

RUN = ("rounds=3", "queries_per_round=128", "method.final_student_steps=400")
INDEX = f"""# What a run leaves

Made with this site, from `fed-dpsd run {" ".join(RUN)}` on digits:

- [the run's page](run.html), of `fed-dpsd report`
- [the privacy officer's sheet](privacy_officer.html), next to it
- [the model card](model_card.md), of `fed-dpsd export`
"""


@functools.cache
def pages() -> tuple[tuple[str, str], ...]:
    """Return each page's name and content, HTML or Markdown."""
    return tuple(_made())


def _made() -> Iterator[tuple[str, str]]:
    yield "examples/index.md", INDEX
    with tempfile.TemporaryDirectory() as folder:
        run = fed_dpsd.run(*RUN, f"run_folder={folder}/run", progress=False)
        page = fed_dpsd.report(run)
        yield "examples/run.html", page.read_text()
        yield "examples/privacy_officer.html", (page.parent / "privacy_officer.html").read_text()
        card = run.export(f"{folder}/model").parent / "README.md"
        yield "examples/model_card.md", card.read_text()
