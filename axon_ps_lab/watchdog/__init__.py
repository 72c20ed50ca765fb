"""A watchdog of event loops: with this folder in PYTHONPATH, every Python watches its loops (`sitecustomize`)."""
