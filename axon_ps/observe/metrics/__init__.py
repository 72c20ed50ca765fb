"""The numbers of `.statistics()` as metrics: described in one table, read when somebody asks for them."""
