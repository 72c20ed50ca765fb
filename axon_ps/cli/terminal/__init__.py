"""Views in a terminal, by `rich`: bars of long work, `status`, `top`, `logs`, `trace`."""
