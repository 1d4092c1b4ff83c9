"""Bands of derivatives near the diagonal, from which gradients of tables by row and distance are summed (device code)."""
