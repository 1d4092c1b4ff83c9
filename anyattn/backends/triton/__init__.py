"""Triton backend: kernels for any GPU that Triton supports. Imported at first use, since Triton is an optional extra."""

from anyattn.backends.triton.append_rotary import append
from anyattn.backends.triton.combine import combine, merge
from anyattn.backends.triton.gathered_keys import gathered
from anyattn.backends.triton.repeater import Repeater

__all__ = ["Repeater", "append", "combine", "gathered", "merge"]
