"""What a worker's container runs to ask for its health: it serves nothing, so whether its coordinator answers."""

from __future__ import annotations

import os
import sys

from axon_ps_cli import main

if __name__ == "__main__":
    sys.exit(main(["health", os.environ.get("AXON_PS_COORDINATOR", "127.0.0.1:7077")]))
