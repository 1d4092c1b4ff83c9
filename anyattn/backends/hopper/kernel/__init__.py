"""CuTe DSL kernels, one module for each role."""
