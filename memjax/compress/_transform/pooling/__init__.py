"""Max-pooling that keeps a byte for each maximum, and ReLUs moved behind it."""
