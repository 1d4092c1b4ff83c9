"""A CPU that is treated as a Hopper GPU, as far as possible without one."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.hardware import Hardware

__all__ = ["H200", "Launch"]

H200 = Hardware("cuda", "an H200", 0, frozenset((torch.float16, torch.bfloat16, torch.float32)), (9, 0), 132)
Launch = tuple[Any, tuple]  # config, arguments
