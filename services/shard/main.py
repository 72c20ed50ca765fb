"""The program of a shard server's container: `axon-ps shard`, with the container's address and ports as defaults."""

from __future__ import annotations

import sys
from pathlib import Path

from axon_ps.host import loop_cache
from axon_ps_cli import main

LOOPS = Path("/opt/loops")
"""The image's compiled loops. Those of another kind of processor are compiled when they are called."""
DEFAULTS = ("shard", "--host", "0.0.0.0", "--port", "7078")

if __name__ == "__main__":
    loop_cache.fill(LOOPS)
    sys.exit(main([*DEFAULTS, *sys.argv[1:]]))
