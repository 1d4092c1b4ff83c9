"""Kernels of keys that single queries have chosen."""
