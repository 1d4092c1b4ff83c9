"""Calls whose rows have the same bits in every batch (``deterministic="batch"``): which the kernel in the order of keys can have.

Its numbers are those of Triton's kernel, instruction by instruction, so that the two may be chosen call by call: prefill is Hopper's, and
decoding, pages and all that is refused here Triton's. Where Triton's compiler may write other instructions, all of it is Triton's. Prefill
of 8,192 rows, 32 heads on an H200, in the default's time, causal, full and in a window of 1,024: at head dimension 128 1.10, 1.11 and 1.19
(Triton's kernel 1.54, 1.61, 1.46; without sections 1.05, 1.05 and 1.15), at 64 1.16, 1.17 and 1.12, at 256 1.11, 1.12 and 1.09.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

from anyattn.backends.hopper.config import TILES_IN_ORDER
from anyattn.backends.hopper.make_config import mods_of
from anyattn.mods.float32_scores import LEAST_SCALE, is_ordinary_scale
from anyattn.problem import Problem

__all__ = ["reason_against"]

_TRITON = "3.6."  # whose instructions were compared (``tests/gpu/test_in_order_gpu.py``)


def reason_against(problem: Problem) -> str | None:
    """Why a call of the mode is left to Triton's kernel, to be read after the mode's name; None if it need not be."""
    if not _is_known_triton():
        return f"its bits are compared with those of Triton {_TRITON}x, which is not installed"
    q, v, sequences = problem.q, problem.v, problem.sequences
    if (q.shape[3], v.shape[3]) not in TILES_IN_ORDER:
        known = ", ".join(str(d) if d == dv else f"{d} with {dv}" for d, dv in TILES_IN_ORDER)
        return f"it has head dimensions {known}: q's is {q.shape[3]} and v's {v.shape[3]}"
    if problem.score is not None:
        return "it has no score mods, whose functions two compilers may round in two ways"
    if not is_ordinary_scale(problem.scale):
        return f"it has scales above {LEAST_SCALE:g} and below {1 / LEAST_SCALE:g}: scale is {problem.scale:g}"
    if sequences is not None and (sequences.page_table is not None or sequences.is_cache):
        return "it reads no pages and no caches that grow"
    _, listed, fields = mods_of(problem, None)
    if listed is not None or fields["always"]:
        return "it has masks that are bands around the diagonal, and no others"
    return None


@lru_cache(maxsize=1)
def _is_known_triton() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton  # of which there are distributions with other names

    return bool(triton.__version__.startswith(_TRITON))
