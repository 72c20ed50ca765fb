"""The images' locks agree with pyproject.toml and constraints.txt; a known vulnerability is an error, unless ignored.

The service that knows vulnerabilities is one of ours, which speaks OSV's protocol; pip-audit is the real one.
"""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import supply_chain
from supply_chain import IMAGES, LINUX, LOCKS, ROOT, Locked, held, locked, reason_not_to_ask

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
}
NAMES = sorted(path.stem for path in LOCKS.glob("*.txt"))
EXTRAS = [name for name in NAMES if name not in ("base", "build")]
VULNERABLE = "pathspec"
OF_PYTORCH = re.compile(r"nvidia-.*|cuda-.*|cupy-.*|triton")
"""What only the lock for CUDA has: PyTorch pins the most of it, and nobody develops with the rest."""


def versions(*locks: str) -> dict[str, str]:
    """Names and versions of locks."""
    found = [each.requirement for lock in locks for each in locked(lock)]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in found}


@pytest.mark.parametrize("name", NAMES)
def test_every_file_has_its_hash_and_every_version_is_that_of_the_constraints(name: str) -> None:
    for package in locked(name):
        assert package.hashes, package.pin
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in package.hashes), package.pin
        canonical = canonicalize_name(package.requirement.name)
        pinned = PINS.get(canonical)
        assert package.pin.endswith(f"=={pinned}") or (OF_PYTORCH.fullmatch(canonical) and pinned is None), package.pin


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_what_pyproject_asks_for_is_in_the_locks(extra: str) -> None:
    asked = PROJECT["project"]["dependencies"] if not extra else PROJECT["project"]["optional-dependencies"][extra]
    found = versions("base", *([extra] if extra else []))
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        version = found.get(name, PINS.get(name) if name == "torch" else None)
        assert version is not None, f"{requirement} is in no lock: run `make locks`"
        assert requirement.specifier.contains(version), f"{requirement}, but the lock has {version}: run `make locks`"


def test_what_builds_our_wheel_is_locked() -> None:
    (backend,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert backend.specifier.contains(versions("build")[backend.name])


@pytest.mark.parametrize(
    "locks", sorted({locks for locks in IMAGES.values() if not any(each.startswith("cuda") for each in locks)})
)
def test_what_the_locked_need_is_locked(locks: tuple[str, ...]) -> None:
    found = {canonicalize_name(each.requirement.name): each for each in held(locks)}
    for package in found.values():
        for needed in map(Requirement, requires(package.requirement.name) or ()):
            if needed.marker is None or needed.marker.evaluate(LINUX):
                of_cuda = OF_PYTORCH.fullmatch(canonicalize_name(needed.name))  # where the tests run with that PyTorch
                assert canonicalize_name(needed.name) in found or of_cuda, (
                    f"{package.pin} needs {needed}: run `make locks`"
                )


def test_pytorch_for_cuda_is_in_its_lock_and_the_one_for_the_cpu_in_none() -> None:
    assert "torch" in versions("cuda13")
    assert not {"torch", "triton"} & versions("base", "torch", "cuda12").keys()
    assert [each.hashes for each in held(("base", "torch")) if each.requirement.name == "torch"] == [()]


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_each_cuda_has_a_cupy_of_its_own_for_both_platforms(cuda: str) -> None:
    found = {name: version for name, version in versions("base", "torch", f"cuda{cuda}").items() if "cupy" in name}
    assert list(found) == [f"cupy-cuda{cuda}x"]
    (package,) = [each for each in held(("base", f"cuda{cuda}")) if "cupy" in each.requirement.name]
    assert len(package.hashes) >= 2


class KnowsOne(BaseHTTPRequestHandler):
    """OSV's protocol: a package and its version in, what is known of it out. It knows one vulnerability."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        about = {"id": "GHSA-xxxx-yyyy-zzzz", "aliases": ["CVE-2030-1"], "details": "", "summary": "", "affected": [
            {"package": {"name": VULNERABLE, "ecosystem": "PyPI"},
             "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}]}]}  # fmt: skip
        self.answer({"vulns": [about]} if asked["package"]["name"] == VULNERABLE else {})

    def do_GET(self) -> None:
        self.answer({"info": {}} if "nothing" in self.path else {"vulnerabilities": []})

    def answer(self, what: object) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def service() -> Iterator[str]:
    """The address of a service that knows one vulnerability."""
    with HTTPServer(("127.0.0.1", 0), KnowsOne) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def bills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the bills of materials are written."""
    monkeypatch.setattr(supply_chain, "SBOM", tmp_path / "sbom")
    return tmp_path / "sbom"


def test_a_known_vulnerability_is_an_error_unless_it_is_ignored_for_a_reason(
    service: str, bills: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"axon-ps-coordinator": ("build",), "axon-ps-worker": ("build", "torch")}
    monkeypatch.setattr(supply_chain, "IMAGES", few)
    assert supply_chain.main(["--osv-url", service]) == 1
    said = capsys.readouterr()
    assert "pathspec 1.1.1: CVE-2030-1, fixed in 99.0" in said.err
    assert "make locks" in said.err
    table = tmp_path / "ignored.toml"
    table.write_text('CVE-2030-1 = "we never do that"\nCVE-2030-2 = "long gone"\n')
    assert supply_chain.main(["--osv-url", service, "--ignored", str(table)]) == 0
    said = capsys.readouterr()
    assert "1 known vulnerabilities, ignored for a reason" in said.out
    assert "CVE-2030-2 is known of nothing" in said.out
    table.write_text('CVE-2030-1 = " "\n')
    with pytest.raises(ValueError, match="has no reason; write CVE-2030-1 ="):
        supply_chain.main(["--osv-url", service, "--ignored", str(table)])
    bill = json.loads((bills / "axon-ps-worker.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert {c["name"] for c in bill["components"]} >= {"hatchling", "torch", "jinja2"}


def test_a_service_that_does_not_answer_is_said(service: str) -> None:
    package = Locked(requirement=Requirement("x==1"), hashes=())
    assert reason_not_to_ask(package, service + "/{name}/{version}") == ""
    assert "does not speak of vulnerabilities" in reason_not_to_ask(package, service + "/nothing/{name}/{version}")
    assert "refused" in reason_not_to_ask(package, "http://127.0.0.1:1/{name}/{version}")


def test_what_could_not_be_looked_up_is_said_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    known, unknown = supply_chain.asked(locked("build")[:1], ["-s", "osv", "--osv-url", "http://127.0.0.1:1"])
    assert supply_chain.report(known, unknown, {}, 1) == 0
    assert "NOT looked up: " in capsys.readouterr().out
