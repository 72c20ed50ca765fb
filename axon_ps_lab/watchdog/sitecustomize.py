"""Watches the event loops of every Python of a test run: `tests/conftest.py` adds this folder to PYTHONPATH."""

from axon_ps_lab.watchdog import loop_watchdog

loop_watchdog.install()
