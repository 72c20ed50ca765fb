"""Has every Python of a test run watch its event loops: this folder is in PYTHONPATH then (`tests/conftest.py`)."""

from axon_ps_lab.watchdog import loop_watchdog

loop_watchdog.install()
