"""Whether Triton's interpreter runs the kernels (``TRITON_INTERPRET=1``), on a CPU and for tests."""

from __future__ import annotations

import os
import sys

__all__ = ["is_interpreting"]


def is_interpreting() -> bool:
    """Whether kernels run in the interpreter, which Triton decides when it is imported; does not import Triton where the answer is no."""
    if "triton" not in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)
