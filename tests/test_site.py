"""The site is whole: it builds without a warning, its links lead somewhere, and it asks no other host for anything.

In a browser: no errors, equations typeset, nothing wider than a phone, a search that finds, dark mode.
"""

import functools
import http.server
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import hoplib as hop

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
pytest.importorskip("sphinx")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of the committed notebooks, with a playground beside it. A warning of Sphinx is an error."""
    folder = tmp_path_factory.mktemp("site")
    playground = folder / "playground.html"
    playground.write_text("<!doctype html><title>a page of its own</title>")
    command = [sys.executable, ROOT / "site" / "build.py", "--output", folder / "out", "--playground", playground]
    done = subprocess.run([*command, "--notebooks", ROOT / "notebooks"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "out"


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loads = [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.anchors.append(found["id"])
        if tag in ("a", "area") and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("next", "prev", "index", "search"):
            self.loads.append(found["href"])
        self.loads += [found[name] for name in ("src", "data", "poster") if found.get(name) and tag != "a"]


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_notebook_is_a_page_with_a_short_title(site):
    index = (site / "index.html").read_text()
    titles = dict(re.findall(r'<li class="toctree-l1"><a class="reference internal" href="([^"]+)">([^<]+)</a>', index))
    assert list(titles)[: len(NOTEBOOKS)] == [f"notebooks/{stem}.html" for stem in NOTEBOOKS]
    assert max(map(len, titles.values())) <= 36
    for stem in NOTEBOOKS:
        page = (site / "notebooks" / f"{stem}.html").read_text()
        assert 'class="cell_output' in page, "without its outputs"


def test_no_link_is_dead(site, pages):
    """Files and anchors; an anchor belongs to one element only."""
    checked = 0
    for path, page in pages.items():
        assert len(page.anchors) == len(set(page.anchors)), path.name
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_relative_to(site.resolve()), f"{path.name}: {link}"
            assert target.is_file(), f"{path.name}: {link}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {link}"
            checked += 1
    assert checked > 500
    print(f"{checked} links on {len(pages)} pages")


def test_it_loads_nothing_from_elsewhere(site, pages):
    for path, page in pages.items():
        assert not [load for load in page.loads if re.match(r"(\w+:)?//", load)], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"""(url\(|@import)\s*["']?(\w+:)?//""", path.read_text()), path.name
    assert (site / "_static" / "mathjax" / "tex-chtml.js").stat().st_size > 1_000_000
    assert list((site / "_static" / "mathjax").rglob("*.woff"))
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 20_000_000


def test_the_pages_lead_on(site, pages):
    index = pages[site / "index.html"]
    assert "playground.html" in index.links
    assert "../playground.html" in pages[site / "notebooks" / "10_explore.html"].loads, "in the place of the widget"
    assert {f"notebooks/{stem}.html" for stem in NOTEBOOKS} <= set(index.links)
    text = (site / "index.html").read_text()
    assert "7-HAM-EO-DEQ" in text, "the table"
    assert "figure-4" in text
    cells = [link for link in pages[site / "CLAIMS.html"].links if "#cell-" in link]
    assert len(cells) == (ROOT / "CLAIMS.md").read_text().count("` |\n"), "a link to the cell of every item"
    assert {f"hoplib.{name}" for name in hop.__all__} <= set(pages[site / "api.html"].anchors)


def test_without_a_playground_the_index_does_not_speak_of_it():
    from jinja2 import Template

    assert "playground" not in Template((ROOT / "site" / "index.md").read_text()).render(playground=False)


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    command = [sys.executable, ROOT / "site" / "build.py", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "left alone" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# -- in a browser -----------------------------------------------------------------------------------------------


@pytest.fixture
def tab(browser):
    """A tab that notes every complaint of a page, and every request that leaves the machine."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    tab = context.new_page()
    tab.complaints = []
    tab.on("console", lambda m: tab.complaints.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda e: tab.complaints.append(str(e)))
    tab.on("requestfailed", lambda r: tab.complaints.append(f"failed: {r.url}"))
    home = re.compile(r"file:|data:|blob:|http://127\.0\.0\.1:")
    tab.on("request", lambda r: None if home.match(r.url) else tab.complaints.append(f"elsewhere: {r.url}"))
    yield tab
    context.close()


@pytest.fixture(scope="module")
def address(site):
    """The site as a static server gives it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


WIDER = "document.documentElement.scrollWidth - window.innerWidth"
# A cell whose code is as long as a line may be: how far does it stick out?
LONG_LINE = """() => {
  const pre = document.querySelector(".cell_input pre, .highlight pre");
  pre.textContent = "x".repeat(88);
  return pre.scrollWidth - pre.clientWidth;
}"""
# Figures that a phone makes smaller than 36rem (576 pixels), or than they are.
TINY = """() => [...document.querySelectorAll(".cell_output img, figure img")]
  .filter((i) => i.width < Math.min(i.naturalWidth, 560)).map((i) => i.alt)"""
# How many printed lines and tables of the index stick out?
WIDE_OUTPUT = """() => [...document.querySelectorAll(".stream pre, #the-table .table-wrapper")]
  .filter((el) => el.scrollWidth > el.clientWidth).length"""


@pytest.mark.parametrize(
    "name", ["index", "table", "CLAIMS", "api", "train", *(f"notebooks/{stem}" for stem in NOTEBOOKS)]
)
def test_a_page_is_clean_and_fits(site, tab, name):
    tab.goto((site / f"{name}.html").as_uri())
    if tab.locator(".math").count():
        tab.evaluate("MathJax.startup.promise.then(() => true)")
        assert tab.locator("mjx-container").count() >= tab.locator(".math").count()
        assert tab.locator("mjx-merror").count() == 0
    assert tab.evaluate(WIDER) <= 0
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate(WIDER) <= 0
    assert tab.evaluate(TINY) == []
    assert tab.evaluate("[...document.images].filter((i) => !i.alt || i.alt.includes('_images')).length") == 0
    tab.set_viewport_size({"width": 1280, "height": 900})
    assert tab.evaluate(WIDE_OUTPUT) == 0
    if tab.locator(".highlight pre").count():
        assert tab.evaluate(LONG_LINE) <= 0
    assert tab.complaints == []


@pytest.mark.parametrize("how", ["from a folder", "from a server"])
def test_a_search_finds(site, address, tab, how):
    tab.goto(f"{address if how == 'from a server' else site.as_uri()}/index.html")
    box = tab.locator("input.sidebar-search")
    box.fill("Anderson")
    box.press("Enter")
    results = tab.locator("#search-results ul.search li a")
    results.first.wait_for()
    tab.wait_for_function("document.querySelector('#search-results h2').innerText == 'Search Results'")
    found = {urlsplit(a.get_attribute("href")).path for a in results.all()}
    assert {"notebooks/02_hopfield_as_deq.html", "api.html"} <= found
    if how == "from a server":
        tab.locator("#search-results p.context").first.wait_for()
        tab.wait_for_load_state("networkidle")  # it fetches the pages found; to leave now would abort that
    results.first.click()
    tab.wait_for_url(lambda url: "search.html" not in url)
    assert tab.complaints == []


def test_dark_mode_toggles_and_figures_stay_on_white(site, tab):
    tab.goto((site / "notebooks" / "08_table_2.html").as_uri())
    colour = "selector => getComputedStyle(document.querySelector(selector)).backgroundColor"
    seen = {}
    for _ in range(3):
        tab.locator(".theme-toggle:visible").first.click()
        seen[tab.locator("body").get_attribute("data-theme")] = tab.evaluate(colour, "body")
        assert tab.evaluate(colour, ".cell_output img") == "rgb(255, 255, 255)"
    light, dark = (sum(map(int, re.findall(r"\d+", seen[theme])[:3])) for theme in ("light", "dark"))
    assert set(seen) == {"auto", "light", "dark"}
    assert dark < 150 < 600 < light
    assert tab.complaints == []
