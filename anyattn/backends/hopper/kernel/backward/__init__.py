"""Backward kernels: dK, dV and the sums of dQ, and the row kernels around them."""
