"""`axon-ps doctor`: properties of this machine and environment, and problems with them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from axon_ps.cli.settings import Settings, environment_report
from axon_ps.errors import AxonError, ConfigurationError
from axon_ps.host import loop_cache
from axon_ps.version import __version__

_REQUIRED = ("grpcio", "protobuf", "numpy", "numba", "safetensors", "fsspec", "grpcio-health-checking")
_OPTIONAL = ("torch", "cupy-cuda12x", "cupy-cuda13x", "s3fs", "grpcio-reflection")
_MIN_FILES = 1024
_MIN_SHM_BYTES = 64 << 20
_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: the thing checked.
        found: its state.
        problem: the problem with it and the remedy; empty = there is none.
    """

    what: str
    found: str
    problem: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Run all checks; each gives a finding, also when it fails."""
    return [
        Finding("axon-ps", f"{__version__} in {Path(__file__).parents[1]}"),
        Finding("python", f"{platform.python_version()} ({sys.executable})"),
        Finding(
            "system", f"{platform.system()} {platform.release()} {platform.machine()}, host {socket.gethostname()}"
        ),
        Finding("cpus", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        Finding("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"),
        *_packages(),
        _gpu(),
        _open_files(),
        _shared_memory(),
        _idle_connections(),
        _kernel_cache(),
        *(Finding(f"${name}", value) for name, value in environment_report().items()),
        _security(settings),
        _coordinator(settings.coordinator),
        *_hangs(settings),
    ]


def print_findings(findings: list[Finding]) -> None:
    """Show the findings as a table, with problems in red."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for f in findings:
        table.add_row("[red]✗[/red]" if f.problem else "[green]✓[/green]", f.what, f.found)
        if f.problem:
            table.add_row("", "", f"[red]{f.problem}[/red]")
    Console(highlight=False).print(table)


def _packages() -> Iterator[Finding]:
    for name in _REQUIRED:
        version = _version(name)
        yield Finding(name, version or "missing", "" if version else f"install it: pip install {name}")
    for name in _OPTIONAL:
        yield Finding(name, _version(name) or "not installed (optional)")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpu() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("gpu", "no NVIDIA driver")
    has_cupy = importlib.util.find_spec("cupy") is not None
    return Finding("gpu", f"NVIDIA driver present, cupy {'installed' if has_cupy else 'not installed'}")


def _open_files() -> Finding:
    from axon_ps.rpc.limits import how_to_raise_files

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = "" if soft >= _MIN_FILES else f"too few for many connections; {how_to_raise_files()}"
    return Finding("open files", f"at most {soft}", problem)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", "missing; PyTorch's loader workers need it, axon_ps does not")
    problem = "" if free >= _MIN_SHM_BYTES else "little for PyTorch's loader workers; in a container: --shm-size 1g"
    return Finding("/dev/shm", f"{free / 2**20:,.0f} MiB free", problem)


def _idle_connections() -> Finding:
    """Check if TCP starts slowly after a pause: between steps connections are idle, so each step would begin slowly."""
    path = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
    try:
        slow = path.read_text(encoding="ascii").strip() != "0"
    except OSError:
        return Finding("tcp", "unknown")
    advice = " (for servers far away: sysctl -w net.ipv4.tcp_slow_start_after_idle=0)"
    return Finding("tcp", f"starts {'slowly' if slow else 'fast'} after a pause{advice if slow else ''}")


def _kernel_cache() -> Finding:
    """Check the folder of numba's compiled loops; without one every process compiles the loops that it calls."""
    if (directory := loop_cache.folder()) is None:
        return Finding("kernel cache", "not writable", "loops are compiled at every start; set NUMBA_CACHE_DIR")
    state = "all loops are compiled" if loop_cache.is_complete() else "`axon-ps run` compiles what is missing"
    return Finding("kernel cache", f"{directory} is writable; {state}")


def _security(settings: Settings) -> Finding:
    from axon_ps.rpc.auth.tokens import is_strong  # imports gRPC

    try:
        security = settings.security()
    except AxonError as error:
        return Finding("security", "settings do not fit together", str(error))
    token = "a token" if security.token else f"a token of {security.token_file}" if security.tokens() else "no token"
    if security.ca_file or security.cert_file:
        tls = "TLS by certificates in files"
    elif security.tls:
        tls = "TLS by the job's own authority"
    elif is_strong(next(iter(security.tokens()), "")) and not security.insecure:
        tls = "TLS by the job's own authority beyond loopback"
    else:
        tls = "no TLS"
    return Finding("security", f"{token}, {tls}")


def _coordinator(address: str) -> Finding:
    if not address:
        return Finding("coordinator", "none named (--coordinator or AXON_PS_COORDINATOR)")
    from axon_ps.rpc.channels import split_address  # imports gRPC

    troubles, addresses = [], address.split(",")
    for each in addresses:
        try:
            with socket.create_connection(split_address(each.strip()), timeout=_CONNECT_TIMEOUT_S):
                pass
        except ConfigurationError as error:
            troubles.append(str(error))
        except OSError as error:
            troubles.append(f"nobody answers {'there' if len(addresses) == 1 else f'at {each}'}: {error}")
    return Finding("coordinator", address if troubles else f"{address} accepts connections", "; ".join(troubles))


def _hangs(settings: Settings) -> Iterator[Finding]:
    if settings.coordinator:
        from axon_ps.cli.hangs import findings

        for problem in findings(settings):
            yield Finding("a collective hangs", "", problem)
