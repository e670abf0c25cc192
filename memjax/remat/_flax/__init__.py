"""`RNN` and `Chain` as Flax modules."""
