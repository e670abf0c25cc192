"""`RNN` and `Chain` as Flax modules, and stacks of equal layers."""
