"""The numbers of `.statistics()` as metrics: described in one table, and read at each scrape."""
