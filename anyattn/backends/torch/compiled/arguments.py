"""Arguments of a compiled pass: the numbers of the C++ ``Args``, and the memory that they point to."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.torch import workspace
from anyattn.backends.torch.compiled import build
from anyattn.backends.torch.compiled.decision import KINDS
from anyattn.backends.torch.compiled.emit import Loops, stored_dtype
from anyattn.backends.torch.compiled.kernel import FIELDS
from anyattn.backends.torch.compiled.work import Work
from anyattn.backends.torch.mod_runner import Bound
from anyattn.problem import Problem

__all__ = ["LANES", "LINE", "ROOM", "Arguments"]

LINE, ROOM, LANES = 144, 96, 16  # ``kernel.LINE``, and bounds of its ROOM and VL
_T = TypeVar("_T")


class _Leaf(NamedTuple):
    """A value that torch has computed: its tensor (B or 1, H or 1, rows or 1, keys or 1), and its first entry for q_idx 0."""

    tensor: Tensor
    first: int = 0


def _leaf(bound: Bound, node: int) -> _Leaf:
    value, stage, dtype = bound.value(node), bound.staging.stage[node], stored_dtype(bound.expr, node)
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=dtype, device="cpu")
    value = value.detach().to(dtype)
    value = value[(None,) * (4 - value.ndim)]
    if stage in ("per_head", "row"):
        return _Leaf(value)
    return _Leaf(value if value.stride(3) == 1 else value.contiguous(), bound.greatest_difference if stage == "diagonal" else 0)


def _leaf_numbers(found: _Leaf) -> tuple[int, ...]:
    t = found.tensor
    b, h, row = (0 if size == 1 else step for size, step in zip(t.shape[:3], t.stride()[:3], strict=True))
    return t.data_ptr() + found.first * t.element_size(), b, h, row


def _table_numbers(t: Tensor) -> tuple[int, ...]:
    return (t.data_ptr(), *(n for pair in zip(t.stride(), t.shape, strict=True) for n in pair))


class Arguments:
    """``kernel.FIELDS`` of a call, with the memory that they point to. q: the queries, or a copy of them. wide, wide_v: the floats of a row
    of D or Dv numbers, with room for the widest vectors."""

    def __init__(self, problem: Problem, work: Work, q: Tensor) -> None:
        d, dv = q.shape[3], problem.v.shape[3]
        self.wide, self.wide_v = (ceil_div(n, 2 * LANES) * 2 * LANES for n in (d, dv))
        self.device = q.device
        self.kept: list[object] = [work]
        self.numbers = dict.fromkeys(FIELDS, 0) | {
            "parallel": build.parallel_address(), "threads": torch.get_num_threads(), "kind": KINDS[q.dtype], "d": d, "dv": dv,
            "ratio": problem.qhead_per_kvhead, "heads_kv": problem.heads_kv, "record_count": work.record_count,
            "scale": struct.unpack("q", struct.pack("d", problem.scale))[0], "predicates": len(problem.predicates),
        }  # fmt: skip
        for name, t in (("q", q), ("k", problem.k), ("v", problem.v)):
            self.tensor(name, t)
        for name in ("entries", "records", "segments", "ranges"):
            self.point(name, getattr(work, name))

    def keep(self, value: _T) -> _T:
        self.kept.append(value)
        return value

    def tensor(self, name: str, t: Tensor) -> None:
        """A tensor's address and its four strides."""
        self.numbers[name] = self.keep(t.detach()).data_ptr()
        self.numbers.update(zip((f"{name}_b", f"{name}_h", f"{name}_s", f"{name}_d"), t.stride(), strict=True))

    def floats(self, count: int) -> int:
        """The address of uninitialised memory."""
        return self.keep(workspace.empty((max(count, 1),), torch.float32, self.device)).data_ptr()

    def point(self, name: str, numbers: array) -> None:
        self.numbers[name] = self.keep(numbers).buffer_info()[0]

    def values(self, loops: Loops, bounds: Mapping[int, Bound]) -> None:
        """The numbers and vectors that torch has computed, and the captured tensors that pairs load. bounds: by ``Source.mod``."""
        self.array("leaves", [n for mod, node in loops.leaves for n in _leaf_numbers(self.keep(_leaf(bounds[mod], node)))])
        self.array("tables", [n for mod, slot in loops.slots for n in _table_numbers(bounds[mod].tensors[slot])])

    def array(self, name: str, numbers: list[int]) -> None:
        self.point(name, array("q", numbers))

    def address(self) -> int:
        return self.keep(array("q", self.numbers.values())).buffer_info()[0]
