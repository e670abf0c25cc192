"""`tiled`: functions of sequences, tile by tile, in both passes."""
