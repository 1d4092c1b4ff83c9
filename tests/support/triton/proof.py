"""Correctness tests of the Triton kernels: every variant of ``tests.support.cases`` in turn over shapes, kinds of input and dtypes.

They run in Triton's interpreter on few keys (``test_in_the_interpreter.py``) and on a GPU on many (``tests/gpu/test_triton_gpu.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from anyattn import masks
from tests.support import cases
from tests.support.cases import Case, Shape

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)

# in tiles of 32 x 16: ragged on both sides, ratios of heads 1, 2, 3 and 5, and all but the first of head dims that need padding
FEW = (Shape(1, 2, 1, 67, 67, 16, 16), Shape(2, 3, 1, 20, 45, 40, 24), Shape(1, 2, 2, 66, 45, 8, 64), Shape(1, 5, 1, 33, 40, 24, 16))
MANY = (
    Shape(2, 8, 4, 1000, 1000, 64, 64),
    Shape(1, 6, 2, 515, 2049, 128, 128),
    Shape(1, 4, 4, 2111, 2111, 96, 64),
    Shape(2, 5, 1, 300, 2048, 72, 128),
    Shape(1, 8, 1, 1025, 900, 256, 256),
)
DIMS = ((8, 8), (16, 40), (40, 16), (33, 16), (20, 33), (100, 17), (72, 72), (96, 96), (64, 128), (128, 64), (192, 128), (256, 256))
RATIOS = (1, 2, 3, 5, 8)


def matrix(shapes: tuple[Shape, ...]) -> list[tuple[Case, torch.dtype]]:
    """Every variant with every kind of input, in each of the dtypes once."""
    found = []
    for i, name in enumerate(cases.VARIANTS):
        for j, kind in enumerate(cases.KINDS):
            shape = shapes[(i + j + i // 4) % len(shapes)]
            shape = shape._replace(seqlen_q=shape.seqlen_k) if name == "documents" else shape  # ids index both q and kv
            found.append((Case(name, shape, kind, seed=3 * i + j), DTYPES[(i // 3 + j) % 3]))
    return found


def alone(shapes: tuple[Shape, ...]) -> list[tuple[Case, torch.dtype]]:
    """One case of every variant, of which the output alone is asked for."""
    return [(case, DTYPES[i % 3]) for i, (case, _) in enumerate(matrix(shapes)[1::3])]


class Rung(NamedTuple):
    """One of the classic kinds of attention, which one kernel computes by its start ranges, head index and mask alone."""

    ratio: int
    mask: Any


LADDER = {
    "plain": Rung(1, None),
    "causal": Rung(1, masks.causal()),
    "causal, grouped": Rung(3, masks.causal()),
    "window, grouped": Rung(2, masks.sliding_window(19, 0)),
    "sink and window, grouped": Rung(2, masks.sink_window(4, 19)),
}
