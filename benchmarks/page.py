"""What the coordinator's page costs: bytes, the first paint, and processor time while a job of 256 members trains.

The coordinator is a process of its own, the page is open in a real headless Chromium, and the members are sessions of
this process that compute nothing but whose steps go on. The coordinator's processor time is taken in turns without and
with a reader; steps take most of it and their rate differs from turn to turn, so the difference is not a page's cost.
Needs Chromium and its driver (apt-get install chromium-driver) and selenium, from the extra `integrations`.

    python benchmarks/page.py [--pictures docs]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))

import psutil
from selenium import webdriver

import _report
from browser import chromium, first_paint_s, ready, size, transferred_bytes, until
from page_job import PageJob, page_job

SIZES = ((1, 1, 1), (6, 2, 2), (224, 32, 32))
"""Workers, shard servers, nodes."""

WINDOW_S = 5.0
TURNS = 3


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and those below it."""
    process = psutil.Process(pid)
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def load(pids: dict[str, int]) -> dict[str, float]:
    """The share of a core that each process takes, in a while."""
    before, began_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(WINDOW_S)
    took_s = time.monotonic() - began_s
    return {name: (cpu_s(pid) - before[name]) / took_s for name, pid in pids.items()}


def measure(job: PageJob, driver: webdriver.Chrome) -> dict[str, Any]:
    """One row."""
    alone, read, browser = [], [], []
    pids = {"coordinator": job.pid, "browser": driver.service.process.pid}
    paint_s = bytes_ = 0.0
    began, began_s = job.workers[0].at[1], time.monotonic()
    for _ in range(TURNS):
        driver.get("about:blank")
        time.sleep(1.0)  # the feed notices that nobody reads
        alone.append(load(pids)["coordinator"])
        driver.get(job.url)
        ready(driver)
        paint_s, bytes_ = max(paint_s, first_paint_s(driver)), max(bytes_, transferred_bytes(driver))
        time.sleep(2.0)  # the page is drawn
        shares = load(pids)
        read.append(shares["coordinator"])
        browser.append(shares["browser"])
    return {
        "transferred_bytes": int(bytes_),
        "first_paint_s": round(paint_s, 3),
        "steps_per_s": round((job.workers[0].at[1] - began) / (time.monotonic() - began_s), 2),
        "coordinator_cores": round(statistics.median(alone), 3),
        "coordinator_cores_with_page": round(statistics.median(read), 3),
        "browser_cores": round(statistics.median(browser), 3),
    }


def picture(driver: webdriver.Chrome, path: Path, height: int, *, dark: bool = False) -> None:
    """The page as it is."""
    driver.execute_script(f"document.documentElement.dataset.theme = '{'dark' if dark else 'light'}'")
    size(driver, 1200, height)
    time.sleep(2.5)  # curves are drawn once a second
    driver.save_screenshot(str(path))


def failover(driver: webdriver.Chrome, path: Path) -> None:
    """The picture of a job of which a server was killed."""
    with page_job(4, 4, 2, "--replication", "2") as job:
        driver.get(job.url)
        ready(driver)
        time.sleep(25.0)
        job.kill_server(0)
        until(lambda: "was lost" in driver.find_element("id", "events").text)
        picture(driver, path, 1120)


def main() -> None:
    """Measures each size, and takes the pictures of the docs if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="write page_*.png into this folder, too")
    folder = parser.parse_args().pictures
    rows = []
    with chromium() as driver:
        for workers, servers, nodes in SIZES:
            with page_job(workers, servers, nodes, "--replication", str(min(2, servers))) as job:
                rows.append({"members": workers + servers, **measure(job, driver)})
                if folder is not None:
                    picture(driver, folder / f"page_{workers + servers}.png", 1000, dark=workers + servers > 8)
                    size(driver, 1280, 900)
        if folder is not None:
            failover(driver, folder / "page_failover.png")
    _report.table("The page", list(rows[0]), [list(row.values()) for row in rows])
    print(_report.write("page", rows, window_s=WINDOW_S, turns=TURNS))


if __name__ == "__main__":
    main()
