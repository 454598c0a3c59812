"""The pages in a real browser: at three widths, in the dark, on paper, by keyboard, and by axe."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fed_dpsd.report import pages, sweep_charts
from fed_dpsd.report.facts import Unfinished
from fed_dpsd.report.settings import read_settings, rows_by_key
from tests.report.runs import SUMMARY, deployment, run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]
RESULTS = Path(__file__).parents[2] / "results"
PAGES = ("run", "many classes", "deployment", "officer", "unfinished", "sweep")
STOPPED = Unfinished(
    *("a-long-name-" * 10, 2, 5, f"{'/folder' * 20} is full", False),
    command=f"flwr run APP federation --stream --run-config 'resume=\"{'a-long-name-' * 10}\"'",
)
PAPER = 695  # CSS pixels between the margins of A4
UNFOLD = "document.querySelectorAll('details').forEach(each => { each.open = true })"
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
RUN_AXE = "axe.run(document, {resultTypes: ['violations'], selectors: false})"
CUT = """[...document.querySelectorAll('main *')]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
    .map(each => each.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def axe():
    """The source of axe-core, which the package brings."""
    package = pytest.importorskip("axe_playwright_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    counts = np.random.default_rng(0).integers(0, 2_000, (20, 20)).tolist()
    many = run(
        folder,
        summary=SUMMARY | {"confusion": counts, "num_clients": 60},
        classes=tuple(f"Moderately differentiated carcinoma {n}" for n in range(20)),
        spent=[{c: 0.1 * c * n for c in range(60)} for n in range(1, 6)],
        command="fed-dpsd run " + "method.a_long_key=" * 20,
    )
    table = RESULTS / "table5_cifar10.csv"
    rounds = rows_by_key([table], "rounds", sweep_charts.ROUND_COLUMNS)
    texts = (
        *(pages.run_page(run(folder)), pages.run_page(many), pages.run_page(deployment(folder))),
        pages.officer_page(deployment(folder)),
        pages.run_page(deployment(folder, unfinished=STOPPED)),
        pages.sweep_page(
            "table5_cifar10", read_settings([table])[6:11], rounds, unfinished=[STOPPED]
        ),
    )
    for name, text in zip(PAGES, texts, strict=True):
        (folder / f"{name}.html").write_text(text)
    return folder


@pytest.fixture
def opened(browser, files):
    """Open a page; at the end, check that its console is empty and it made no other request."""
    contexts, messages, urls = [], [], []

    def open_page(name, width=1440, **settings):
        context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.goto((files / f"{name}.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not messages
    assert {url.partition(":")[0] for url in urls} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in urls) == len(contexts)


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_screen(opened, name):
    page = opened(name)
    for step in ("", UNFOLD):
        page.evaluate(step)
        for width in (360, 800, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(WIDER) == 0, width


@pytest.mark.parametrize(
    ("name", "scheme"),
    [*((name, "light") for name in PAGES), ("run", "dark")],
)
def test_axe_finds_nothing_serious(opened, axe, name, scheme):
    page = opened(name, 360 if scheme == "light" else 1440, color_scheme=scheme)
    page.evaluate(UNFOLD)
    page.evaluate(axe)
    found = page.evaluate(RUN_AXE)["violations"]
    seen = [(each["id"], each["impact"], each["nodes"][0]["html"]) for each in found]
    assert not [each for each in seen if each[1] in ("serious", "critical")]


def test_axe_would_find_what_is_wrong(opened, axe):
    """The control: pale text and a picture without words."""
    page = opened("run")
    page.evaluate("document.body.style.color = '#ccc'; document.images[0].removeAttribute('alt')")
    page.evaluate(axe)
    found = page.evaluate(RUN_AXE)["violations"]
    assert {"color-contrast", "image-alt"} <= {each["id"] for each in found}
    assert all(each["nodes"][0]["html"] for each in found)


def test_what_is_wider_than_the_screen_would_be_found(opened):
    """The control, at a width that a page is brought to after it was opened."""
    page = opened("run")
    page.evaluate("document.querySelector('main').style.minWidth = '500px'")
    page.set_viewport_size({"width": 360, "height": 900})
    assert page.evaluate(WIDER) > 0


def test_the_dark_page_is_dark_and_paper_is_white(opened):
    colour = "getComputedStyle(document.body).backgroundColor"
    page = opened("run", color_scheme="dark")
    assert sum(map(int, page.evaluate(colour)[4:-1].split(","))) < 100
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(colour) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("name", PAGES)
def test_on_paper_nothing_is_cut_and_nothing_stays_folded(opened, name):
    page = opened(name, PAPER)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not page.evaluate("document.querySelectorAll('details:not([open])').length")
    assert not page.evaluate(CUT)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.evaluate("document.querySelectorAll('details[open]').length")


def test_the_first_key_leads_past_the_links_to_the_result(opened):
    page = opened("run", 360)
    page.keyboard.press("Tab")
    link = "document.activeElement.getBoundingClientRect().left"
    assert page.evaluate("document.activeElement.hash") == "#main"
    assert page.evaluate(link) >= 0
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_a_matrix_can_be_scrolled_by_keyboard_on_a_phone(opened):
    page = opened("many classes", 360)
    page.evaluate(UNFOLD)
    place = "[...document.querySelectorAll('.scroll')].find(e => e.scrollWidth > e.clientWidth)"
    assert page.evaluate(f"{place}.tabIndex") == 0
    page.evaluate(f"{place}.focus()")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"{place}.scrollLeft > 0", timeout=5_000)


def test_pages_stay_small(files):
    sizes = {path.stem: path.stat().st_size for path in files.glob("*.html")}
    assert set(sizes) == set(PAGES)
    assert max(sizes.values()) < 1_000_000
