"""What the images hold: bills of materials, and whether a known vulnerability is among it.

    make lab NAME=audit      # also a part of `make lint`

Writes build/sbom/IMAGE.cdx.json (CycloneDX, by cyclonedx-py) from services/locks/, with the hashes of every file, and
asks PyPI's vulnerability service about every package (pip-audit). A known vulnerability fails, unless
services/locks/ignored_vulnerabilities.toml says why it does not concern us. On a network where the service does not
answer nothing is known, which is said in a line and is no failure: elsewhere it is looked up.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "services" / "locks"
IGNORED = LOCKS / "ignored_vulnerabilities.toml"
SBOM = ROOT / "build" / "sbom"
IMAGES = {
    "axon-ps-coordinator": ("base", "etcd"),
    "axon-ps-shard": ("base", "etcd"),
    "axon-ps-worker": ("base", "torch"),
    "axon-ps-worker-cuda": ("base", "torch", "cuda13"),
    "axon-ps-worker-cuda12": ("base", "torch", "cuda12"),
}
"""The locks that each image is installed from; what builds our own wheel is in none."""
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "python_version": "3.11",
         "python_full_version": "3.11.14", "platform_python_implementation": "CPython",
         "implementation_name": "cpython", "platform_machine": "x86_64", "extra": ""}  # fmt: skip
PYPI = "https://pypi.org/pypi/{name}/{version}/json"
FIRST_ANSWER_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Locked:
    """A package of a lock.

    Attributes:
        requirement: name, version and marker.
        hashes: "sha256:..." of its files.
    """

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def pin(self) -> str:
        """As "name==version"."""
        return f"{self.requirement.name}{self.requirement.specifier}"

    def on_linux(self) -> bool:
        """Whether the images, which are of Linux and CPython, get it."""
        marker: Marker | None = self.requirement.marker
        return marker is None or marker.evaluate(LINUX)


def locked(name: str) -> list[Locked]:
    """The packages of services/locks/NAME.txt."""
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [
        Locked(requirement=Requirement(line.partition(" --hash")[0]), hashes=tuple(re.findall(r"--hash=(\S+)", line)))
        for line in lines
    ]


def held(locks: Iterable[str]) -> list[Locked]:
    """What an image from these locks holds, and PyTorch's CPU build, which no lock has."""
    found = {each.pin: each for lock in locks for each in locked(lock) if each.on_linux()}
    if "torch" in locks and not any(pin.startswith("torch==") for pin in found):
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        (torch,) = re.findall(r"^torch==\S+", pins, flags=re.MULTILINE)
        found[torch] = Locked(requirement=Requirement(torch), hashes=())
    return [found[pin] for pin in sorted(found)]


def write_bills() -> None:
    """Write the bill of materials of every image whose locks are newer.

    Raises:
        RuntimeError: cyclonedx-py fails; with what it printed.
    """
    SBOM.mkdir(parents=True, exist_ok=True)
    sources = [Path(__file__), ROOT / "constraints.txt", *LOCKS.glob("*.txt")]
    newest_s = max(source.stat().st_mtime for source in sources)
    for locks in sorted(set(IMAGES.values())):
        bills = [SBOM / f"{image}.cdx.json" for image, its in IMAGES.items() if its == locks]
        if not all(bill.exists() and bill.stat().st_mtime > newest_s for bill in bills):
            text = _bill(held(locks))
            for bill in bills:
                bill.write_text(text, encoding="utf-8")


def _bill(packages: Sequence[Locked]) -> str:
    lines = [" ".join([each.pin, *(f"--hash={h}" for h in each.hashes)]) for each in packages]
    tool = str(Path(sys.executable).with_name("cyclonedx-py"))
    command = [tool, "requirements", "-", "--output-reproducible", "--no-validate", "--pyproject", "pyproject.toml"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def reason_not_to_ask(package: Locked, pages: str = PYPI) -> str:
    """Why PyPI's vulnerability service cannot be asked, or nothing: it can.

    A mirror of the index may have no such pages, and pip-audit then finds no vulnerability in anything. So ask for one.
    """
    (version,) = package.requirement.specifier
    url = pages.format(name=package.requirement.name, version=version.version)
    try:
        with urllib.request.urlopen(url, timeout=FIRST_ANSWER_S) as answer:
            return "" if "vulnerabilities" in json.load(answer) else f"{url} does not speak of vulnerabilities"
    except (OSError, ValueError) as error:
        return f"{url}: {getattr(error, 'reason', error) or error}"


def ignored(path: Path = IGNORED) -> Mapping[str, str]:
    """The ids of vulnerabilities that do not concern us, with the reason.

    Raises:
        ValueError: one has no reason.
    """
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, reason in found.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f'{path}: {name} has no reason; write {name} = "why it does not concern the images"')
    return found


@dataclass(frozen=True, kw_only=True)
class Known:
    """A known vulnerability: in words, and by all its ids."""

    words: str
    ids: frozenset[str]


def asked(packages: Sequence[Locked], options: Sequence[str]) -> tuple[list[Known], list[str]]:
    """What pip-audit knows of packages, and what it could not look up, with the reason."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(each.pin for each in packages))
        file.flush()
        tool = str(Path(sys.executable).with_name("pip-audit"))
        command = [
            tool,
            "-r",
            file.name,
            "--no-deps",
            "--disable-pip",
            "--progress-spinner=off",
            "-f",
            "json",
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout.strip():
        return [], [f"pip-audit: {(done.stderr.strip() or 'no answer').splitlines()[-1]}"]
    answers = json.loads(done.stdout)["dependencies"]
    return [k for a in answers for k in known_of(a)], [a["skip_reason"] for a in answers if "skip_reason" in a]


def known_of(answer: Mapping[str, Any]) -> Iterator[Known]:
    """The vulnerabilities of what pip-audit answers about a package."""
    for known in answer.get("vulns", ()):
        fixed = ", ".join(known["fix_versions"]) or "no version yet"
        words = f"{answer['name']} {answer['version']}: {known['id']}, fixed in {fixed}"
        yield Known(words=words, ids=frozenset({known["id"], *known["aliases"]}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the bills, ask, and report; 1 where something known concerns us."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--osv-url", default="", help="ask a service of OSV's protocol there instead of PyPI")
    parser.add_argument("--ignored", type=Path, default=IGNORED, help="the ids to ignore, each with its reason")
    options = parser.parse_args(arguments)
    why = ignored(options.ignored)
    write_bills()
    packages = list({each.pin: each for locks in IMAGES.values() for each in held(locks)}.values())
    reason = "" if options.osv_url else reason_not_to_ask(packages[0])
    if reason:
        print(
            f"supply chain: known vulnerabilities were NOT looked up here ({reason}); bills of materials: build/sbom/"
        )
        return 0
    known, unknown = asked(packages, ["-s", "osv", "--osv-url", options.osv_url] if options.osv_url else [])
    return report(known, unknown, why, len(packages))


def report(known: Sequence[Known], unknown: Sequence[str], why: Mapping[str, str], count: int) -> int:
    """Say what was found; 1 where something known concerns us."""
    for reason in unknown:
        print(f"supply chain: NOT looked up: {reason}")
    for name in sorted(why.keys() - {name for each in known for name in each.ids}):
        print(f"supply chain: {name} is known of nothing that was looked up; is it still to be ignored?")
    concerning = [each.words for each in known if not each.ids & why.keys()]
    for words in concerning:
        print(f"supply chain: {words}", file=sys.stderr)
    if concerning:
        print(f"Update it in constraints.txt and run `make locks`, or say in {IGNORED.name} why it does not "
              "concern the images.", file=sys.stderr)  # fmt: skip
        return 1
    print(f"supply chain: {count - len(unknown)} packages looked up, {len(known)} known vulnerabilities, ignored for a "
          "reason; bills of materials: build/sbom/")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
