"""Backward kernels: dK, dV and the sums of dQ or dQ itself, and the row kernels around them."""
