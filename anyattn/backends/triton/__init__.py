"""Kernels in Triton, for any GPU it reaches; see ``run.py``. Nothing here is imported before it is used; Triton is an extra."""

from anyattn.backends.triton.append import append
from anyattn.backends.triton.backward_pass import backward
from anyattn.backends.triton.combine import combine
from anyattn.backends.triton.run import Result, forward

__all__ = ["Result", "append", "backward", "combine", "forward"]
