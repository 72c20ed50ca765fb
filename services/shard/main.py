"""What a shard server's container runs: `axon-ps shard`, with the container's places as defaults."""

from __future__ import annotations

import sys

from axon_ps_cli import main

DEFAULTS = ("shard", "--host", "0.0.0.0", "--port", "7078")

if __name__ == "__main__":
    sys.exit(main([*DEFAULTS, *sys.argv[1:]]))
