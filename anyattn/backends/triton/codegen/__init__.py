"""Source text of the Triton kernels: a call's mods as device functions."""
