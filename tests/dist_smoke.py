"""`make lab NAME=dist`: a wheel and an sdist, installed into an empty environment and tried as a user would.

The environment has neither torch nor anything of this repository. Its packages come from the index that pip is
configured for, at the versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_WHEEL = (
    "axon_ps/py.typed",
    "axon_ps/wire/v1/coordinator_pb2.py",
    "axon_ps/wire/v1/coordinator_pb2.pyi",
    "axon_ps_cli.py",
    "axon_ps_torch.py",
)
IN_SDIST = (
    "LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "protos/axon_ps/wire/v1/coordinator.proto",
    "services/shard/Dockerfile", "examples/train_gpt.py", "tests/dist_smoke.py", "docs/index.md",
)  # fmt: skip

COLLECTIVES = """
import numpy as np
import axon_ps

with axon_ps.World.init() as world:
    print("sum", axon_ps.all_reduce_sum(np.full(1, world.rank + 1.0, np.float32))[0], world.num_shards, flush=True)
"""


def run(*command: str | Path, cwd: Path, **values: str) -> str:
    """Run a command to its end, without this repository on its path; what it wrote."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("AXON_PS_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=ours | values, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist; the wheel of the sdist has the same files."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)  # the wheel is built from the sdist
    again = folder / "of-the-tree"
    run(sys.executable, "-m", "build", "--wheel", "--outdir", again, ROOT, cwd=folder)
    (wheel,), (sdist,), (direct,) = folder.glob("*.whl"), folder.glob("*.tar.gz"), again.glob("*.whl")
    assert contents(wheel) == contents(direct), "the sdist builds another wheel than the tree"
    direct.unlink()
    again.rmdir()
    return wheel, sdist


def contents(wheel: Path) -> dict[str, str]:
    """The files of a wheel, and their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def check_contents(wheel: Path, sdist: Path) -> None:
    """What is promised is in them, and nothing else is at the top."""
    names = contents(wheel).keys()
    assert not [name for name in IN_WHEEL if name not in names], sorted(names)
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "axon_ps",
        "axon_ps_cli.py",
        "axon_ps_lab",
        "axon_ps_torch.py",
    }
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in IN_SDIST if name not in inside], sorted(inside)


def use(python: Path, folder: Path) -> None:
    """Import it, ask the doctor, start services, run a job on two workers."""
    command = python.parent / "axon-ps"
    assert run(python, "-c", "import axon_ps, axon_ps_torch; print(axon_ps.__file__)", cwd=folder).startswith(
        str(python.parents[1])
    )
    assert "grpcio" in run(command, "doctor", cwd=folder)
    script = folder / "collectives.py"
    script.write_text(COLLECTIVES)
    embedded = run(command, "run", "--nproc-per-node", "2", "--shards", "1", script, cwd=folder)
    assert embedded.count("sum 3.0 1") == 2, embedded
    with (
        serving(command, folder, "coordinator", "--port", "0", "--state", "memory") as address,
        serving(command, folder, "shard", "--port", "0", "--coordinator", address),
    ):
        given = ("run", "--coordinator", address, "--nproc-per-node", "2", script)
        assert run(command, *given, cwd=folder).count("sum 3.0 1") == 2
        print(run(command, "status", "--coordinator", address, cwd=folder))


@contextlib.contextmanager
def serving(command: Path, folder: Path, *options: str) -> Iterator[str]:
    """A service of the command line; yields its address when it listens, and ends it by SIGTERM."""
    ready, write = os.pipe()
    os.set_inheritable(write, True)
    child = subprocess.Popen([command, *options, "--ready-fd", str(write)], cwd=folder, pass_fds=(write,))
    os.close(write)
    try:
        with os.fdopen(ready) as line:
            yield line.readline().strip()
    finally:
        child.terminate()
        code = child.wait(60)
    assert code == 0


def main() -> None:
    """Build, check, install, try; the files stay in dist/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    outdir = parser.parse_args().outdir.resolve()
    began_s = time.monotonic()
    outdir.mkdir(exist_ok=True)
    for old in (*outdir.glob("axon_ps-*.whl"), *outdir.glob("axon_ps-*.tar.gz")):
        old.unlink()
    wheel, sdist = build(outdir)
    check_contents(wheel, sdist)
    print(f"built {wheel.name}, {wheel.stat().st_size >> 10} KiB, and {sdist.name}, {sdist.stat().st_size >> 10} KiB")
    with tempfile.TemporaryDirectory() as temporary:
        empty = Path(temporary) / "venv"
        venv.create(empty, with_pip=True)
        python = empty / "bin" / "python"
        pinned = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        run(python, "-m", "pip", "install", "-q", wheel, cwd=Path(temporary), **pinned)
        use(python, Path(temporary))
    print(f"installed into an empty environment and tried, {time.monotonic() - began_s:.0f} s in all")


if __name__ == "__main__":
    main()
