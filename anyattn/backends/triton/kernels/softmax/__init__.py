"""Parts of the online softmax (device code): weights of a tile, the order in which tiles are visited, and sums by sections of the keys."""
