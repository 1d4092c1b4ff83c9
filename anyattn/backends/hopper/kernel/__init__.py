"""The CuTe DSL kernel: one file for each role."""
