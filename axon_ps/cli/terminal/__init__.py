"""Views in a terminal: bars of long work, `status --watch`, `top`. Knows `rich`; decides nothing."""
