"""Attention with torch operations: the CPU backend, and a fallback-free reference on anything torch runs on."""

from anyattn.backends.torch.combine import combine
from anyattn.backends.torch.run import backward, forward

__all__ = ["backward", "combine", "forward"]
