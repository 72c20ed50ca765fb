"""A headless Chromium without a network of its own: pictures, the accessibility tree, what was transferred."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
SOON_S = 60.0


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[webdriver.Chrome]:
    """A browser with a new, empty profile."""
    with tempfile.TemporaryDirectory() as profile:
        options = Options()
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        try:
            size(driver, width, height)
            yield driver
        finally:
            driver.quit()


def size(driver: webdriver.Chrome, width: int, height: int) -> None:
    """The size of the page's window; a phone's is narrower than the browser's own windows can be."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def until(what: Callable[[], Any]) -> Any:
    """What `what` returns, once it is true."""
    deadline = time.monotonic() + SOON_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.05)
    return found


def ready(driver: webdriver.Chrome) -> None:
    """Wait until the page shows a job."""
    until(lambda: driver.execute_script("return document.body.dataset.ready"))


def names(driver: webdriver.Chrome) -> list[tuple[str, str]]:
    """(role, name) of everything in the accessibility tree."""
    tree = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored")]


def transferred_bytes(driver: webdriver.Chrome) -> float:
    """What came over the wire for the page's files; its feed goes on for ever, and is not in it."""
    script = """return [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
        .filter(entry => !entry.name.includes('/api/')).reduce((sum, entry) => sum + entry.transferSize, 0)"""
    return float(driver.execute_script(script))


def first_paint_s(driver: webdriver.Chrome) -> float:
    """From the navigation to the first paint of contents."""
    script = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return float(driver.execute_script(script)) / 1000
