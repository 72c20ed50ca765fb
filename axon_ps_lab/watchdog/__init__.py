"""A watchdog of event loops; this folder in PYTHONPATH has every Python watch its loops (`sitecustomize`)."""
