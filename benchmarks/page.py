"""Cost of the coordinator's page: bytes, first paint, and processor time while a job of 256 members trains.

The coordinator is a process of its own, and the page is open in a real headless Chromium. The members are sessions of
this process, which compute nothing but make two steps a second. The coordinator's processor time is measured without
and with the page, alternating; `page_cores` is the median of the differences between neighbouring turns.
It needs Chromium and its driver (apt-get install chromium-driver) and selenium, from the extra `integrations`.

    python benchmarks/page.py [--pictures docs]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "third_party"))

import psutil
from selenium import webdriver

from axon_ps_lab import report
from browser import chromium, first_paint_s, ready, size, transferred_bytes, until
from page_job import PageJob, page_job

SIZES = ((1, 1, 1), (6, 2, 2), (224, 32, 32))
"""Numbers of workers, shard servers, nodes."""

STEP_S = 0.5
WINDOW_S = 5.0
PAUSE_S = 2.0
SHOWN_S = 25.0
TURNS = 5


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and its descendants."""
    process = psutil.Process(pid)
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def share(pid: int) -> float:
    """Measure the part of a core that a process uses, over `WINDOW_S`."""
    before_s, began_s = cpu_s(pid), time.monotonic()
    time.sleep(WINDOW_S)
    return (cpu_s(pid) - before_s) / (time.monotonic() - began_s)


def measure(job: PageJob, driver: webdriver.Chrome) -> dict[str, Any]:
    """Measure one row: turns without and with a page, of the same steps."""
    job.step_every(STEP_S)
    alone, read, browser, rates = [], [], [], []
    paint_s = bytes_ = 0.0
    for _ in range(TURNS):
        driver.get("about:blank")
        time.sleep(PAUSE_S)  # until the feed notices that it has no reader
        rates.append(rate(job, lambda: alone.append(share(job.pid))))
        driver.get(job.url)
        ready(driver)
        paint_s, bytes_ = max(paint_s, first_paint_s(driver)), max(bytes_, transferred_bytes(driver))
        time.sleep(PAUSE_S)  # until the page is drawn
        before_s = cpu_s(driver.service.process.pid)
        rates.append(rate(job, lambda: read.append(share(job.pid))))
        browser.append((cpu_s(driver.service.process.pid) - before_s) / WINDOW_S)
    return {
        "transferred_bytes": int(bytes_),
        "first_paint_s": round(paint_s, 3),
        "steps_per_s": [round(min(rates), 2), round(max(rates), 2)],
        "coordinator_cores": round(statistics.median(alone), 3),
        "coordinator_cores_with_page": round(statistics.median(read), 3),
        "page_cores": round(statistics.median(b - a for a, b in zip(alone, read, strict=True)), 3),
        "browser_cores": round(statistics.median(browser), 3),
    }


def rate(job: PageJob, work: Callable[[], Any]) -> float:
    """Return the steps per second during `work`."""
    began, began_s = job.workers[0].at[1], time.monotonic()
    work()
    return float(job.workers[0].at[1] - began) / (time.monotonic() - began_s)


def picture(driver: webdriver.Chrome, path: Path, height: int, *, dark: bool = False, width: int = 1200) -> None:
    """Take a picture of the page."""
    driver.execute_script(f"document.documentElement.dataset.theme = '{'dark' if dark else 'light'}'")
    size(driver, width, height)
    time.sleep(2.5)  # curves are drawn once a second
    driver.save_screenshot(str(path))


def failover(driver: webdriver.Chrome, folder: Path) -> None:
    """Take pictures of a job after a server was killed, and of its page on a phone."""
    with page_job(4, 4, 2, "--replication", "2") as job:
        driver.get(job.url)
        ready(driver)
        time.sleep(SHOWN_S)
        job.kill_server(0)
        until(lambda: "was lost" in driver.find_element("id", "events").text)
        time.sleep(5.0)
        for name, dark in (("page_failover", False), ("page_failover_dark", True)):
            picture(driver, folder / f"{name}.png", 1270, dark=dark)
        picture(driver, folder / "page_phone.png", 1700, width=390)


def main() -> None:
    """Measure each size, and take the pictures of the docs if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="only write page_*.png into this folder")
    folder = parser.parse_args().pictures
    rows = []
    with chromium() as driver:
        for workers, servers, nodes in SIZES:
            with page_job(workers, servers, nodes, "--replication", str(min(2, servers))) as job:
                if folder is not None:
                    driver.get(job.url)
                    ready(driver)
                    time.sleep(SHOWN_S)
                    picture(driver, folder / f"page_{workers + servers}.png", 1000, dark=workers + servers > 8)
                    size(driver, 1280, 900)
                else:
                    rows.append({"members": workers + servers, **measure(job, driver)})
        if folder is not None:
            failover(driver, folder)
            return
    report.table("The page", list(rows[0]), [list(row.values()) for row in rows])
    print(report.write("page", rows, window_s=WINDOW_S, turns=TURNS, step_s=STEP_S))


if __name__ == "__main__":
    main()
