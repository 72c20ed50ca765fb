"""What a process says about itself: logs. Libraries only ever call `logging.getLogger(__name__)`."""
