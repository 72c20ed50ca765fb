"""The page in a real Chromium: what it shows by name, at three sizes, while a server dies, and to whom."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from browser import chromium, names, ready, size, transferred_bytes, until
from page_job import page_job

NAMED = {"button", "textbox", "table", "figure", "image", "region", "log", "status", "columnheader", "rowheader"}
"""Roles whose elements must have a name."""


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        yield driver


def text(browser: webdriver.Chrome, element: str) -> str:
    return str(browser.find_element(By.ID, element).text)


@pytest.mark.parametrize(("workers", "servers", "nodes"), [(1, 1, 1), (4, 4, 2), (224, 32, 32)])
def test_every_member_and_element_has_a_name_and_the_page_fits(
    browser: webdriver.Chrome, workers: int, servers: int, nodes: int
) -> None:
    with page_job(workers, servers, nodes) as job:
        browser.get(job.url)
        ready(browser)
        until(lambda: "version" in text(browser, "laststep"))
        until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "figure")) > 1)
        tree = names(browser)
        for kind, count in (("shard server", servers), ("worker", workers)):
            tiles = {name for role, name in tree if role == "button" and name.startswith(kind)}
            assert {name.split(" on ")[0] for name in tiles} == {f"{kind} {n}" for n in range(count)}
        nameless = [role for role, name in tree if role in NAMED and not name]
        assert not nameless
        headings = {name.split(" ")[0] for role, name in tree if role == "heading"}
        assert {"Members", "Steps", "Stragglers", "Events", "Log"} <= headings
        assert transferred_bytes(browser) <= 300_000
        for width in (380, 1280):
            size(browser, width, 900)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_servers_death_is_told_in_words_and_the_page_says_when_the_coordinator_is_gone(
    browser: webdriver.Chrome,
) -> None:
    with page_job(2, 3, 2) as job:
        browser.get(job.url)
        ready(browser)
        until(lambda: "version" in text(browser, "laststep"))
        job.kill_server(0)
        until(lambda: "was lost: its connection broke" in text(browser, "events"))
        until(
            lambda: (
                "is now the primary of" in text(browser, "events") or "are now the primary" in text(browser, "events")
            )
        )
        until(lambda: "2 shard servers" in text(browser, "count"))
        job.process.kill()
        until(lambda: "asking again" in text(browser, "connection"))


def test_who_has_no_token_sees_nothing_an_observer_everything_and_the_job_may_drain(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    observers = tmp_path / "observer"
    observers.write_text("only-to-read")
    with page_job(1, 3, 1, "--observer-token-file", str(observers), token="all-of-it") as job:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{job.url}api/feed", timeout=10)
        for token, drains in (("wrong", None), ("only-to-read", False), ("all-of-it", True)):
            browser.execute_script("window.sessionStorage?.clear()") if token != "wrong" else None
            browser.get(job.url)
            until(lambda: browser.find_element(By.ID, "token").is_displayed())
            browser.find_element(By.ID, "token").send_keys(token)
            browser.find_element(By.CSS_SELECTOR, "#login button").click()
            if drains is None:
                until(lambda: "none of this server's" in text(browser, "refusal"))
                continue
            ready(browser)
            until(lambda: browser.find_elements(By.CSS_SELECTOR, ".tile.server"))
            until(lambda: browser.execute_script("return document.body.dataset.operator"))
            browser.find_elements(By.CSS_SELECTOR, ".tile.server")[0].click()
            assert browser.find_element(By.ID, "m-drain").is_displayed() == drains
        browser.find_element(By.ID, "m-drain").click()
        browser.switch_to.alert.accept()
        until(lambda: "is drained: others take its slices" in text(browser, "events"))
        request = urllib.request.Request(f"{job.url}api/servers/1/drain", method="POST")
        request.add_header("Authorization", "Bearer only-to-read")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=10)


def test_by_keyboard_light_and_dark_steps_and_the_log(browser: webdriver.Chrome) -> None:
    with page_job(2, 1, 1, "--log-level", "info") as job:
        browser.get(job.url)
        ready(browser)
        script = "return getComputedStyle(document.documentElement).getPropertyValue('--dark').trim()"
        before = browser.execute_script(script)
        browser.find_element(By.ID, "theme").send_keys(Keys.ENTER)
        assert browser.execute_script(script) != before
        until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#steps li")) > 3)
        browser.find_element(By.ID, "steps").send_keys(Keys.HOME)
        oldest = text(browser, "laststep")
        browser.find_element(By.ID, "steps").send_keys(Keys.ARROW_RIGHT)
        assert text(browser, "laststep") != oldest
        until(lambda: "2 workers, 1 shard servers" in text(browser, "log"))
        browser.find_element(By.ID, "level").send_keys("errors")
        until(lambda: not browser.find_elements(By.CSS_SELECTOR, "#log li"))
        tile = browser.find_elements(By.CSS_SELECTOR, ".tile.server")[0]
        tile.send_keys(Keys.ENTER)
        until(lambda: browser.find_element(By.ID, "member").is_displayed())
        assert "counter_1" in text(browser, "m-facts")
        browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        until(lambda: not browser.find_element(By.ID, "member").is_displayed())
        assert browser.switch_to.active_element == tile
        stops = "return [...document.querySelectorAll('button, select')].every(element => element.tabIndex >= 0)"
        assert browser.execute_script(stops)
