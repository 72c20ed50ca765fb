"""The program of the coordinator's container: `axon-ps coordinator`, with the container's paths as defaults."""

from __future__ import annotations

import sys

from axon_ps_cli import main

DEFAULTS = ("coordinator", "--host", "0.0.0.0", "--port", "7077", "--state", "/state/coordinator.sqlite")

if __name__ == "__main__":
    sys.exit(main([*DEFAULTS, *sys.argv[1:]]))
