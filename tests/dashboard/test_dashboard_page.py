"""The page in a real browser: it shows a run that is going on, follows it, and does no harm whatever the store holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_browser import Browser
from shown_run import LAYERS, MARKUP, ShownRun

from deltawire.chain.records.published_relays import publish_relay
from deltawire.dashboard import Observer, write_report
from deltawire.dashboard.server import DashboardServer
from deltawire.format.records.member_records import UpdateReport
from deltawire.store import keys

WIDTHS = [(1280, "wide"), (390, "phone")]
PANELS = ("tasks", "lag", "pauses", "sync", "reward", "mismatch", "density", "staleness", "links", "members", "readers", "storage")
FITS = "return document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ShownRun]:
    shown = ShownRun(tmp_path / "run", name=f"a run {MARKUP}")
    yield shown
    shown.close()


@pytest.fixture
def served(run: ShownRun) -> Iterator[DashboardServer]:
    """Serve the run. Tests call `look` themselves, so they decide when the page changes."""
    with Observer(run.store) as observer:
        server = DashboardServer(observer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.close()
        thread.join()


def busy(run: ShownRun) -> None:
    """Let the run have a bit of everything that the page shows."""
    for _ in range(9):
        run.publish({"note": MARKUP})
    run.board()
    for number, name in enumerate(["steady", "slow", "m" * 64, "__proto__"]):
        run.beat(name, lag=number, seq=run.seqs[-1 - number], step=run.step - 1 - number, working=())
    run.beat("gone", state="left", reason=f"EngineError: {MARKUP}")
    run.round(0, 3)
    for task, name in enumerate(["steady", "slow", "steady"]):
        run.lease(0, task, name)
    key = run.deliver(0, 0)
    run.deliver(0, 1)
    run.acknowledge(0, {"steady": key})
    run.pin("steady", run.seqs[3])
    run.report("engine-1", "refused", MARKUP)


def assert_unharmed(browser: Browser) -> None:
    assert browser.run("return window.harmed") is None
    assert browser.run("return document.images.length") == 0


def test_the_page_shows_a_run_and_follows_it(run: ShownRun, served: DashboardServer, browser: Browser) -> None:
    busy(run)
    served.observer.look()
    browser.open(served.url)
    browser.until("return document.getElementById('live').textContent === 'live'")
    assert browser.run("return document.querySelectorAll('.column').length") == 11
    assert browser.run("return document.querySelector('.tile b').textContent") == "10"
    for panel in PANELS:
        assert browser.run(f"return document.getElementById('{panel}').childElementCount"), panel
    hidden = browser.run("return [...document.querySelectorAll('.card')].filter((card) => card.hidden).map((card) => card.id)")
    assert hidden == ["channels-card", "traffic-card", "gates-card"]
    run.publish()
    run.beat("late-joiner")
    served.observer.look()
    browser.until("return document.querySelector('.tile b').textContent === '11'")
    browser.until("return document.getElementById('members').textContent.includes('late-joiner')")
    assert_unharmed(browser)
    browser.shoot("live")


def test_pauses_and_bytes_of_members_are_followed(run: ShownRun, served: DashboardServer, browser: Browser) -> None:
    busy(run)
    publish_relay(run.store, run.record, "eu-west", str(run.store.url) + "-copy")
    served.observer.look()
    browser.open(served.url)
    browser.until("return document.getElementById('live').textContent === 'live'")
    assert browser.run("return pauseView.dots.length") == 5, "one update of each member is known at first"
    assert "2.5 ms at most" in browser.text("pause-words")
    version = run.publish()
    run.beat("slow", seq=version.seq, update=UpdateReport(pause_us=70_000, total_us=90_000))
    served.observer.look()
    browser.until("return pauseView.dots.length === 6")
    assert "70 ms at most (slow" in browser.text("pause-words")
    cells = "[...row.cells].map((cell) => cell.textContent)"
    rows = browser.run(f"return [...document.querySelectorAll('#links tbody tr')].map((row) => {cells})")
    taken = {row[0]: row[1:] for row in rows}
    assert taken["to slow"][0] == "10 MB/s"
    assert taken["to slow"][5:] != ["–", "–", "–"], "what it took since the first look"
    assert taken["to steady"][5:] == ["–", "–", "–"]
    assert taken["trainer to store"][5:] == taken["store to region eu-west"][5:]
    assert [row[0] for row in rows].index("to slow") > 1
    browser.press("/")
    browser.press("slow")
    browser.until("return pauseView.dots.filter((dot) => dot.marked).length === 2")


def test_the_page_waits_for_a_run_that_has_not_begun(tmp_path: Path, browser: Browser) -> None:
    from deltawire.store import open_store

    with open_store(str(tmp_path / "later")) as store, Observer(store) as observer:
        server = DashboardServer(observer)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            observer.look()
            browser.open(server.url)
            browser.until("return document.getElementById('problem').textContent.includes('nothing is published')")
            run = ShownRun(tmp_path / "later")
            observer.look()
            browser.until("return document.querySelectorAll('.column').length === 2")
            assert browser.run("return document.getElementById('problem').hidden")
            run.close()
        finally:
            server.close()
            thread.join()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "name"), WIDTHS, ids=[name for _, name in WIDTHS])
def test_the_page_fits_and_has_the_colours_of_the_system(
    run: ShownRun, served: DashboardServer, browser: Browser, width: int, name: str, dark: bool
) -> None:
    busy(run)
    served.observer.look()
    browser.open(served.url, width=width, height=800, dark=dark)
    browser.until("return document.getElementById('live').textContent === 'live'")
    assert browser.run(FITS), "the page must not scroll sideways"
    red, green, blue = (int(part) for part in str(browser.run("return getComputedStyle(document.body).backgroundColor"))[4:-1].split(","))
    assert (max(red, green, blue) < 60) == dark
    browser.shoot(f"{name}-{'dark' if dark else 'light'}")
    browser.run(f"openDetails({run.seqs[-1]})")
    browser.until("return document.querySelectorAll('.heat td').length > 0")
    assert browser.run(FITS)
    browser.shoot(f"{name}-{'dark' if dark else 'light'}-details")


def test_a_version_shows_its_tensors_as_a_heat_map(run: ShownRun, served: DashboardServer, browser: Browser) -> None:
    busy(run)
    served.observer.look()
    browser.open(served.url)
    browser.run(f"document.querySelector('[data-seq=\"{run.seqs[-1]}\"]').dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    browser.until("return document.querySelectorAll('.heat').length === 2")
    assert browser.text("details-title") == "Version 10"
    assert browser.run("return document.querySelector('.heat tbody').rows.length") == LAYERS
    body = browser.text("details-body")
    assert "model.layers.0.mlp.up_proj.weight" in body
    assert MARKUP in body, "names with markup are shown as text"
    assert_unharmed(browser)


def test_keys_choose_and_open_versions(run: ShownRun, served: DashboardServer, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    busy(run)
    served.observer.look()
    browser.open(served.url)
    browser.press(Keys.ARROW_LEFT)
    browser.press(Keys.ARROW_LEFT)
    browser.until(f"return document.querySelector('.column.chosen')?.dataset.seq === '{run.seqs[-2]}'")
    browser.press(Keys.ENTER)
    browser.until("return document.getElementById('details').open && document.getElementById('details-title').textContent === 'Version 9'")
    browser.press(Keys.ARROW_RIGHT)
    browser.until("return document.getElementById('details-title').textContent === 'Version 10'")
    browser.press(Keys.ESCAPE)
    browser.until("return !document.getElementById('details').open")
    browser.press("t")
    browser.until("return document.documentElement.dataset.theme === 'light'")
    browser.press("/")
    browser.press("slow")
    browser.until("return document.querySelectorAll('#members tbody tr').length === 1")


def test_a_corrupt_version_is_shown_as_such(run: ShownRun, served: DashboardServer, browser: Browser) -> None:
    busy(run)
    run.store.put(keys.commit_key(run.seqs[4]), f'{{"bad": "{MARKUP}"}}'.encode())
    served.observer.look()
    browser.open(served.url)
    assert browser.run("return document.querySelectorAll('.column').length") == 11, "all other versions are shown as usual"
    assert browser.run(f"return document.querySelector('[data-seq=\"{run.seqs[4]}\"] .k-corrupt') !== null")
    assert f"Commit {run.seqs[4]} cannot be used" in browser.text("faults")
    browser.run(f"openDetails({run.seqs[4]})")
    browser.until("return document.querySelector('#details .damage') !== null")
    browser.shoot("corrupt")
    assert_unharmed(browser)


def test_the_page_survives_a_store_that_goes_away(run: ShownRun, served: DashboardServer, browser: Browser, tmp_path: Path) -> None:
    busy(run)
    served.observer.look()
    browser.open(served.url)
    browser.until("return document.getElementById('live').textContent === 'live'")
    (tmp_path / "run").rename(tmp_path / "away")
    served.observer.look()
    browser.until("return document.getElementById('live').textContent === 'the store does not answer'")
    assert not browser.run("return document.getElementById('problem').hidden")
    assert browser.run("return document.querySelectorAll('.column').length") == 11, "what was seen stays"
    browser.shoot("store-away")
    (tmp_path / "away").rename(tmp_path / "run")
    run.publish()
    served.observer.look()
    browser.until("return document.getElementById('live').textContent === 'live'")
    browser.until("return document.querySelectorAll('.column').length === 12")


def test_the_page_survives_a_server_that_is_started_again(run: ShownRun, browser: Browser) -> None:
    busy(run)
    with Observer(run.store) as observer:
        observer.look()
        first = DashboardServer(observer)
        thread = threading.Thread(target=first.serve_forever)
        thread.start()
        browser.open(first.url)
        browser.until("return document.getElementById('live').textContent === 'live'")
        first.close()
        thread.join()
        browser.until("return document.getElementById('live').textContent === 'no connection to deltawire'")
        run.publish()
        observer.look()
        second = DashboardServer(observer, port=first.server_address[1])
        thread = threading.Thread(target=second.serve_forever)
        thread.start()
        browser.until("return document.querySelectorAll('.column').length === 12")
        second.close()
        thread.join()
    browser.complaints()  # requests while no server was there


def test_the_saved_page_needs_no_server(run: ShownRun, browser: Browser, tmp_path: Path) -> None:
    busy(run)
    with Observer(run.store) as observer:
        observer.look()
        write_report(observer, tmp_path / "run.html", details=2)
    browser.open((tmp_path / "run.html").as_uri())
    assert browser.run("return document.querySelectorAll('.column').length") == 11
    assert browser.text("live").startswith("saved ")
    browser.run(f"openDetails({run.seqs[-1]})")
    browser.until("return document.querySelectorAll('.heat').length === 2")
    browser.run(f"openDetails({run.seqs[0]})")
    browser.until("return document.getElementById('details-body').textContent.includes('does not hold the details')")
    assert_unharmed(browser)
    browser.shoot("saved")
