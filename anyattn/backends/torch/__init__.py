"""Attention with torch operations: the CPU backend, and a fallback-free reference on anything torch runs on."""

from anyattn.backends.torch.api import backward, forward
from anyattn.backends.torch.combine import combine

__all__ = ["backward", "combine", "forward"]
