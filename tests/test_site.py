"""The site: it builds, no link is broken, pages are light, figures have words, and a phone and a
dark room can show it.
"""

import gzip
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

ROOT = Path(__file__).resolve().parents[1]
HEAVIEST = 1_500_000  # bytes of a page with all that it loads, as a host sends them: compressed

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="smalldocs needs Python 3.11"),
    pytest.mark.skipif(
        bool(shutil.which("quarto")),
        reason="Quarto's pages are Quarto's: these tests are about smalldocs'",
    ),
]


@pytest.fixture(scope="module")
def site() -> Path:
    done = subprocess.run(
        [sys.executable, "tools/docs.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr  # with the links that are broken
    return ROOT / "_docs"


class Page(HTMLParser):
    "What a page loads, and its pictures that have no words."

    def __init__(self, path: Path):
        super().__init__()
        self.loads = list[str]()
        self.bare = list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("img", "iframe") and not (found.get("alt") or found.get("title") or "").strip(
            " ."
        ):
            self.bare.append((found.get("src") or "")[:60])
        if source := found.get("src") or (
            tag == "link" and found.get("rel") == "stylesheet" and found.get("href")
        ):
            self.loads.append(source)


@cache
def bytes_sent(file: Path) -> int:
    return len(gzip.compress(file.read_bytes(), 6))


def test_pages_are_light_and_their_figures_have_words(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 150
    for path in pages:
        page = Page(path)
        assert not page.bare, f"{path}: {page.bare}"
        files = [
            (path.parent / source).resolve()
            for source in page.loads
            if not source.startswith("data:")
        ]
        assert not [source for source in page.loads if source.startswith("http")], (
            f"{path} asks another host"
        )
        weight = sum(map(bytes_sent, {path, *files}))
        assert weight < HEAVIEST, f"{path} weighs {weight:,} bytes"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_every_page_on_a_phone(site: Path, browser: Browser) -> None:
    """No error in the console, no sideways scrolling at 390 pixels, no other host; every second
    page is seen in the dark.
    """
    problems = []
    with served(site) as url:
        for number, path in enumerate(sorted(site.rglob("*.html"))):
            name = path.relative_to(site).as_posix()
            browser.events.clear()
            browser.size(390, 844, dark=number % 2 == 1)
            browser.open(f"{url}/{name}")
            if (width := browser.js("document.documentElement.scrollWidth")) > 390:
                problems.append(f"{name} is {width} pixels wide")
            problems += [f"{name}: {error}" for error in browser.errors()]
            sent = [
                e["params"]["request"]["url"]
                for e in browser.events
                if e["method"] == "Network.requestWillBeSent"
            ]
            other = [one for one in sent if not one.startswith((url, "data:", "blob:", "about:"))]
            problems += [f"{name} asks {one[:80]}" for one in other]
    assert not problems, "\n".join(problems)


CONTRAST = """(() => {
  const light = text => { const c = text.match(/[\\d.]+/g).map(Number).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/^rgba.*, 0(\\.\\d+)?\\)$/.test(c) && c !== 'transparent') return c; } return 'rgb(255, 255, 255)'; };
  return SELECTORS.flatMap(s => [...document.querySelectorAll(s)].slice(0, 40)).filter(e => e.innerText.trim()).map(e => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.innerText.slice(0, 40)]; }).filter(([ratio]) => ratio < 3);
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_words_can_be_read(site: Path, browser: Browser, dark: bool) -> None:
    "Headings, text, code, tables, sidebar and contents stand out from what is behind them."
    selectors = [
        "h1",
        "main p",
        "main pre code",
        "main td",
        "#quarto-sidebar .menu-text",
        "#TOC a",
        ".navbar-title",
    ]
    found = set()
    with served(site) as url:
        for name in ("index", "scheduler", "confusions", "glossary"):
            browser.size(1280, 900, dark)
            browser.open(f"{url}/{name}.html")
            assert browser.js("!!document.querySelector('.quarto-dark')") is dark
            found |= {one for one in selectors if browser.js(f"!!document.querySelector({one!r})")}
            pale = browser.js(CONTRAST.replace("SELECTORS", json.dumps(selectors)))
            assert not pale, f"{name}: {pale}"
    assert found == set(selectors)


def test_the_home_page_plays(site: Path, browser: Browser) -> None:
    """The player starts by itself, where motion is wanted, and goes from step to step; the search
    finds a chapter.
    """
    with served(site) as url:
        browser.size(1280, 900)
        browser.open(f"{url}/index.html")
        frame = browser.js("document.querySelector('iframe').srcdoc")
        assert "data-autoplay" in frame
        browser.js(f"document.open(), document.write({json.dumps(frame)}), document.close()")
        browser.until("/^Step ([2-9]|1\\d)/.test(document.getElementById('said')?.textContent)")
        browser.open("about:blank")
        browser.open(f"{url}/index.html")
        browser.js("document.querySelector('#quarto-search input').focus()")
        browser.send("Input.insertText", text="preempt")
        browser.until(
            "document.querySelector('#quarto-search').innerText.toLowerCase().includes('preempt')"
        )
