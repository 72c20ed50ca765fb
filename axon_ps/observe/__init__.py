"""Logs, reminders of waits, and moments for tests. Libraries only ever call `logging.getLogger(__name__)`."""
