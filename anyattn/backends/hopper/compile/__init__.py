"""Compilation and launch of CuTe DSL kernels, and their keys in the disk cache."""
