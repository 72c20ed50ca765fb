"""Has every Python of a test run watch its event loops: this folder is in PYTHONPATH then (`tests/conftest.py`)."""

import loop_watchdog

loop_watchdog.install()
