"""What a worker's container runs: `axon-ps run` on a coordinator elsewhere (AXON_PS_COORDINATOR names it)."""

from __future__ import annotations

import sys

from axon_ps_cli import main

DEFAULTS = ("run", "--shards", "0")

if __name__ == "__main__":
    sys.exit(main([*DEFAULTS, *sys.argv[1:]]))
