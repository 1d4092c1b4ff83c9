"""Torch backend: attention by torch operations, for the CPU and any other device that torch supports."""

from anyattn.backends.torch.api import backward, forward, reads_lists
from anyattn.backends.torch.combine import combine

__all__ = ["backward", "combine", "forward", "reads_lists"]
