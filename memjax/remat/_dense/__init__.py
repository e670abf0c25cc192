"""`dense_block`: the dense connectivity of DenseNets in memory linear in depth."""
