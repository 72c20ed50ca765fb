"""For tests on real GPUs."""

from __future__ import annotations

import os

os.environ["NCCL_RAS_ENABLE"] = "0"  # it listens until the process ends, and a test must leave no port behind
