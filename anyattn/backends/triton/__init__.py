"""Triton backend: kernels for any GPU that Triton supports; see ``api.py``. Imported at first use, since Triton is an optional extra."""

from anyattn.backends.triton.api import forward
from anyattn.backends.triton.append_rotary import append
from anyattn.backends.triton.backward_pass import backward
from anyattn.backends.triton.combine import combine
from anyattn.backends.triton.documents import reads_lists

__all__ = ["append", "backward", "combine", "forward", "reads_lists"]
