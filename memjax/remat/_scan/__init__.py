"""`scan` and `schedule`: equal steps within a memory budget."""
