"""The health check of a worker's container: a worker serves nothing, so its coordinator must answer."""

from __future__ import annotations

import os
import sys

from axon_ps_cli import main

if __name__ == "__main__":
    sys.exit(main(["health", os.environ.get("AXON_PS_COORDINATOR", "127.0.0.1:7077")]))
