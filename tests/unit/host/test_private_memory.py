"""A process whose memory is private writes no core and cannot be read. Tests of `host/private_memory.py`."""

from __future__ import annotations

import subprocess
import sys

from deadlines import HANG_S

PROGRAM = """
import ctypes, resource
from axon_ps.host.private_memory import make_memory_private
before = resource.getrlimit(resource.RLIMIT_CORE)
make_memory_private()
PR_GET_DUMPABLE = 3
print(ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1]))
"""


def test_the_kernel_gives_the_memory_to_nobody_and_writes_no_core() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.stdout, done.stderr) == ("0 True\n", "")
