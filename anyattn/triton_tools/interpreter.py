"""Detection of Triton's interpreter (``TRITON_INTERPRET=1``), which runs kernels on a CPU, for tests."""

from __future__ import annotations

import os
import sys

__all__ = ["is_interpreting"]


def is_interpreting() -> bool:
    """Whether kernels run in the interpreter, which Triton decides when it is imported. Imports Triton only if the answer may be yes."""
    if "triton" not in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)
