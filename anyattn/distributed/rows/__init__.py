"""Tensors of a rank's rows: cut, padded, gathered, and captured by mods."""
