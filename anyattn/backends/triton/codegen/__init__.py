"""Code generation for the Triton kernels: a call's mods as device functions, and kernel entries that call them."""
