"""Compiling and launching CuTe DSL kernels, and their names in the disk cache."""
