"""Triton kernels (device code)."""
