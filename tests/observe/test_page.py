"""The page, in a real browser: it loads with no error and no network, shows what there is, stays usable."""

from __future__ import annotations

import re
import shutil
from collections.abc import Generator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB
from remap.observe.snapshot import DeviceState, Item, Piece, Snapshot
from remap.types import Access, Location, LocationKind

HOSTILE = "</script><script>window.hurt=1</script><img src=x onerror='window.hurt=1'>\u2028"


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    """The system's Chromium, without a window."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


class Page:
    """A page that is open, and everything that went wrong in it."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light") -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.tab = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", lambda message: self.errors.append(message.text))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri())

    def __enter__(self) -> Any:
        return self.tab

    def __exit__(self, *_: object) -> None:
        self.tab.close()
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith(("file:", "data:"))] == []


def rows(tab: Any) -> list[str]:
    """Return the text of the table's rows."""
    return [str(text) for text in tab.locator("#rows tr").all_inner_texts()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads_and_shows_everything(browser: Any, program: Any, tmp_path: Path, scheme: str) -> None:
    """No error and no request in either colour scheme; every object is in the table, and the map is painted."""
    snapshot = remap.snapshot()
    with Page(browser, snapshot.save(tmp_path / "map.html"), scheme) as tab:
        assert tab.get_attribute("html", "data-ready")
        painted = tab.evaluate(
            "() => { const c = document.getElementById('picture'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; const seen = new Set();"
            " for (let i = 0; i < d.length; i += 4) if (d[i + 3]) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);"
            " return seen.size; }"
        )
        assert painted > 5
        tab.click("#view")
        said = "\n".join(rows(tab))
        for item in snapshot.items:
            assert f"{item.kind} {item.serial}" in said
        assert tab.locator("#totals tr").count() == len(snapshot.shares())


def test_search(browser: Any, program: Any, tmp_path: Path) -> None:
    """The search finds by kind, by group, and by any address inside; what is not there finds nothing."""
    with Page(browser, remap.snapshot().save(tmp_path / "map.html")) as tab:
        tab.click("#view")
        ring, inside = program.ring, program.reservation.address + 9 * MiB
        for asked, found in (
            ("ring", [f"ring buffer {ring.serial}"]),
            ("WEIGHTS", [f"buffer {program.buffer.serial}"]),
            (
                hex(inside),
                [f"mapping {program.mappings[1].serial}", f"reservation {program.reservation.serial}"],
            ),
            ("no such thing", []),
        ):
            tab.fill("#search", asked)
            said = rows(tab)
            assert len(said) == len(found), (asked, said)
            assert all(any(name in row for row in said) for name in found)


def test_keyboard(browser: Any, program: Any, tmp_path: Path) -> None:
    """Every stretch and every mapping can be reached by key, and what is chosen is said as text."""
    with Page(browser, remap.snapshot().save(tmp_path / "map.html")) as tab:
        tab.focus("#picture")
        seen: set[str] = set()
        for _ in range(12):
            tab.keyboard.press("ArrowDown")
            seen.add(tab.inner_text("#said").splitlines()[0])
            tab.keyboard.press("]")
            seen.add(tab.inner_text("#said").splitlines()[0])
        assert {f"reservation {program.reservation.serial}", f"mapping {program.mappings[0].serial}"} <= seen
        for key in ("+", "ArrowRight", "ArrowLeft", "-", "0", "Home", "End", "PageUp", "PageDown", "["):
            tab.keyboard.press(key)


def test_hover_and_theme(browser: Any, program: Any, tmp_path: Path) -> None:
    """Hovering tells what lies there; the theme can be turned by hand."""
    with Page(browser, remap.snapshot().save(tmp_path / "map.html")) as tab:
        tab.hover("#picture", position={"x": 30, "y": 26})
        assert tab.is_visible("#tip")
        assert "0x" in tab.inner_text("#tip")
        before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.click("#theme")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    """Markup and script in names reach the page as text (11)."""
    with remap.group(HOSTILE), remap.allocate(2 * MiB):
        snapshot = remap.snapshot()
    with Page(browser, snapshot.save(tmp_path / "map.html")) as tab:
        tab.click("#view")
        assert tab.evaluate("window.hurt") is None
        assert "<script>" in rows(tab)[0]


def large(count: int) -> Snapshot:
    """Return a snapshot of `count` mappings in one reservation and of as many buffers, made up."""
    base, size = 0x7F00_0000_0000, 2 * MiB
    places = [Location(LocationKind.DEVICE, index) for index in range(2)]
    mappings = [
        Item(
            "mapping",
            at + 2,
            size,
            base + at * size,
            "",
            None,
            (piece(base + at * size, places[at % 2], at + 1),),
        )
        for at in range(count)
    ]
    whole = Item("reservation", 1, count * size, base, "", (base, count * size))
    devices = tuple(DeviceState(index, "made up", 1 << 35, 1 << 36) for index in range(2))
    return Snapshot("2026-01-01T00:00:00.000+00:00", 1, "host", "made up", devices, (whole, *mappings))


def piece(address: int, place: Location, memory: int) -> Piece:
    """Return 2 MiB that one place may write."""
    return Piece(address, 2 * MiB, place, memory, ((place, Access.READ_WRITE),))


def apart(count: int) -> Snapshot:
    """Return a snapshot of `count` buffers, each in a stretch of its own."""
    made = large(count)
    items = tuple(
        Item("buffer", one.serial, one.size, one.address, "", (one.address or 0, one.size), one.pieces)
        for one in made.items[1:]
    )
    return Snapshot(made.taken, 1, "host", "made up", made.devices, items)


@pytest.mark.parametrize("make", [large, apart])
def test_ten_thousand_mappings_stay_usable(browser: Any, tmp_path: Path, make: Any) -> None:
    """10,000 mappings are painted within 2 s of the page's start, in one stretch or in as many; search answers."""
    with Page(browser, make(10_000).save(tmp_path / "map.html")) as tab:
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
        assert 0 < paint < 2000
        assert int(tab.get_attribute("html", "data-ready")) < 2000
        drawn = tab.evaluate(
            "() => { const t = performance.now(); for (let i = 0; i < 5; i++) draw(); "
            "return (performance.now() - t) / 5; }"
        )
        assert drawn < 200
        tab.fill("#search", "0x7f0000200000")
        tab.click("#view")
        assert 1 <= len(rows(tab)) <= 2


# -- without a browser --


class Links(HTMLParser):
    """Collects every address that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_it_is_self_contained(program: Any) -> None:
    """The page names nothing outside of itself, and forbids itself the network."""
    text = remap.snapshot().to_html()
    links = Links()
    links.feed(text)
    assert [link for link in links.found if not link.startswith("data:")] == []
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)


def test_notebooks_get_no_script(program: Any) -> None:
    """`_repr_html_` of snapshots and of objects is HTML without JavaScript, and escapes what it shows."""
    with remap.group(HOSTILE), remap.allocate(2 * MiB) as named:
        shown = [remap.snapshot()._repr_html_(), named._repr_html_(), program.ring._repr_html_()]
        shown.append(program.allocation._repr_html_())
    for text in shown:
        links = Links()
        links.feed(text)
        assert links.scripts == 0
        assert links.found == []
        assert "<img" not in text
        assert "onerror='" not in text
    program.allocation.close()
    assert (
        "closed" in program.allocation._repr_html_()
        or "physical allocation" in program.allocation._repr_html_()
    )
