"""`plan` and `planned`: any function within a memory budget, at the least recomputation."""
