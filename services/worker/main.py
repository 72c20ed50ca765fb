"""The program of a worker's container: `axon-ps run` on a coordinator elsewhere (AXON_PS_COORDINATOR names it)."""

from __future__ import annotations

import sys
from pathlib import Path

from axon_ps.host import loop_cache
from axon_ps_cli import main

LOOPS = Path("/opt/loops")
"""The image's compiled loops. Those of another kind of processor are compiled when they are called."""
DEFAULTS = ("run", "--shards", "0")

if __name__ == "__main__":
    loop_cache.fill(LOOPS)
    sys.exit(main([*DEFAULTS, *sys.argv[1:]]))
