"""Torch backend: attention by torch operations, for the CPU and any other device that torch supports."""

from anyattn.backends.torch.api import Repeater
from anyattn.backends.torch.combine import combine

__all__ = ["Repeater", "combine"]
