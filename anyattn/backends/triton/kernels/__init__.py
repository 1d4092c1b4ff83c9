"""Triton kernels, device side."""
