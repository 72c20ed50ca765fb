"""Prints as JSON the permissions of the process that runs it: `docker exec -i CONTAINER python - < confined.py`."""

import json
import os
import re
from pathlib import Path

FOLDERS = (
    "/",
    "/app",
    "/bin",
    "/etc",
    "/home/axon",
    "/opt/venv",
    "/opt/venv/bin",
    "/root",
    "/usr/bin",
    "/usr/lib",
    "/var",
)
OURS = ("python*", "axon-ps", "torchrun", "ldconfig*")


def written(folder: str) -> bool:
    """Return True if a file can be made in a folder."""
    probe = Path(folder) / f"probe-{os.getpid()}"
    try:
        probe.write_text("")
    except OSError:
        return False
    probe.unlink()
    return True


def programs() -> list[str]:
    """Return the names of all programs in the usual folders, except Python and ours."""
    folders = [
        *os.environ["PATH"].split(":"),
        "/bin",
        "/sbin",
        "/usr/bin",
        "/usr/sbin",
        "/usr/local/bin",
        "/usr/local/sbin",
    ]
    found = {each for folder in folders if Path(folder).is_dir() for each in Path(folder).iterdir()}
    return sorted({each.name for each in found if not any(each.match(ours) for ours in OURS)})


status = dict(re.findall(r"^(\w+):\s*(.*)$", Path("/proc/1/status").read_text(), flags=re.MULTILINE))
print(
    json.dumps(
        {
            "user": status["Uid"].split()[0],
            "capabilities": sorted(name for name in status if name.startswith("Cap") and int(status[name], 16)),
            "no_new_privileges": status["NoNewPrivs"] == "1",
            "seccomp": int(status["Seccomp"]),
            "writable": [folder for folder in FOLDERS if written(folder)],
            "temporary": written("/tmp"),
            "programs": programs(),
        }
    )
)
