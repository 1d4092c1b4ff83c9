"""Kernels in Triton. Nothing here is imported before it is used; Triton is an extra."""
