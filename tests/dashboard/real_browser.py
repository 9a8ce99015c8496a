"""A real browser for tests of the page: Debian's Chromium, driven by Selenium. Without them these tests are skipped, with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
SHOTS = Path(__file__).resolve().parents[2] / "build" / "dashboard"
"""Where screenshots are kept, for people to look at."""
_PATIENCE = 240.0
"""Seconds after which a condition counts as never met. Tests wait for conditions, not for this time."""


class Browser:
    """One tab of a browser. `until` waits for a condition in the page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page in a window of this size, with this colour scheme, and wait until it is drawn."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(url)
        self.until("return document.documentElement.dataset.drawn")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def until(self, script: str) -> Any:
        """Wait until a script returns something that counts as true, and return it."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, _PATIENCE, poll_frequency=0.05).until(lambda driver: driver.execute_script(script), script)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver, duration=0).send_keys(key).perform()

    def text(self, element: str) -> str:
        return str(self.run(f"return document.getElementById('{element}').textContent"))

    def shoot(self, name: str) -> None:
        """Keep a picture of the whole page."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        width, height = self.run("return [window.innerWidth, document.documentElement.scrollHeight]")
        self.resize(width, height)
        self.driver.save_screenshot(str(SHOTS / f"{name}.png"))

    def complaints(self) -> list[str]:
        """Return what the browser has logged as errors, such as scripts that failed or that the policy refused."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="session")
def new_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Browser]]:
    """Return a function that returns the browser, which is started once."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.binary_location = programs[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    yield lambda: Browser(driver)
    driver.quit()


@pytest.fixture
def browser(new_browser: Callable[[], Browser]) -> Iterator[Browser]:
    """A browser that shows nothing yet. A test fails if its page logs an error that the test has not read."""
    found = new_browser()
    found.complaints()
    yield found
    assert not found.complaints()
    found.driver.get("about:blank")
