"""Logs, metrics, traces, reminders of waits, and moments for tests.

Library modules only call `logging.getLogger(__name__)`.
"""
