"""Programs that import FlashAttention as public ones of their kinds do. Each has ``run(dtype, compiled)``, which returns its results.

They are executed anew for each provider of the modules: anyattn, and ``tests.support.plain_flash``.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROGRAMS = sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*.py"))


def results(program: str, dtype: torch.dtype, compiled: Callable[[Any], Any] = lambda f: f) -> dict[str, Tensor]:
    """The results of the program with the modules that are provided now."""
    torch.manual_seed(0)
    found = runpy.run_path(str(Path(__file__).with_name(f"{program}.py")))["run"](dtype, compiled)
    return {name: t.detach() for name, t in found.items()}
