"""Triton kernels that make tile lists on a GPU."""
