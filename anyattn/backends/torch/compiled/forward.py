"""Forward pass by compiled loops: the arguments of the C++ function, and its call."""

from __future__ import annotations

import struct
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.result import Result
from anyattn.backends.torch import workspace
from anyattn.backends.torch.compiled import build
from anyattn.backends.torch.compiled.decision import KINDS, loops, mods
from anyattn.backends.torch.compiled.emit import strong
from anyattn.backends.torch.compiled.kernel import FIELDS
from anyattn.backends.torch.compiled.work import Work
from anyattn.backends.torch.mod_runner import Bound, bind
from anyattn.problem import Problem

__all__ = ["forward"]

_LINE, _ROOM, _LANES = 144, 96, 16  # ``kernel.LINE``, and bounds of its ROOM and VL
_LARGE = 2**19  # items x keys: of 64 rows


def forward(problem: Problem, work: Work, result: Result) -> bool:
    """Writes the tensors of ``result``. False if nothing could be compiled, or a mod read a captured tensor outside of its size."""
    found = loops(problem)
    function = None if isinstance(found, str) else build.function_of(found.text)
    if function is None or isinstance(found, str):
        return False
    bounds = {at: bind(m.expr, m.scalars, m.tensors, problem) for at, m in mods(problem).items()}
    leaves = [_leaf(bounds[at], node) for at, node in found.leaves]
    tables = [bounds[at].tensors[slot] for at, slot in found.slots]
    arguments = _Arguments(problem, work, result)
    arguments.point("leaves", array("q", [n for leaf in leaves for n in _leaf_numbers(leaf)]))
    arguments.point("tables", array("q", [n for t in tables for n in _table_numbers(t)]))
    return function(arguments.address()) == 0


class _Leaf(NamedTuple):
    """A value that torch has computed: its stage, its tensor (B or 1, H or 1, rows or 1, keys or 1), and its first entry for q_idx 0."""

    stage: str
    tensor: Tensor
    first: int = 0


def _leaf(bound: Bound, node: int) -> _Leaf:
    value, stage, dtype = bound.value(node), bound.staging.stage[node], strong(bound.expr.nodes[node].dtype)
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=dtype, device="cpu")
    value = value.detach().to(dtype)
    value = value[(None,) * (4 - value.ndim)]
    if stage in ("per_head", "row"):
        return _Leaf(stage, value)
    return _Leaf(stage, value if value.stride(3) == 1 else value.contiguous(), bound.greatest_difference if stage == "diagonal" else 0)


def _leaf_numbers(leaf: _Leaf) -> tuple[int, ...]:
    t = leaf.tensor
    b, h, row = (0 if size == 1 else step for size, step in zip(t.shape[:3], t.stride()[:3], strict=True))
    return t.data_ptr() + leaf.first * t.element_size(), b, h, row


def _table_numbers(t: Tensor) -> tuple[int, ...]:
    return (t.data_ptr(), *(n for pair in zip(t.stride(), t.shape, strict=True) for n in pair))


class _Arguments:
    """``kernel.FIELDS`` of a call, with the memory that they point to."""

    def __init__(self, problem: Problem, work: Work, result: Result) -> None:
        out, lse, highest = result
        sink = None if problem.sink is None else problem.sink.detach().to(torch.float32).contiguous()
        q, k, v = problem.q.detach(), problem.k.detach(), problem.v.detach()
        d, dv, threads = q.shape[3], v.shape[3], torch.get_num_threads()
        pairs, width, keys = problem.batch * problem.heads_kv, ceil_div(dv, 2 * _LANES) * 2 * _LANES, work.packed_keys * problem.heads_kv
        most_keys = max(work.entries[10::11])
        # copies before everything else are made by all threads at once, but a second parallel region waits once more for a busy core
        is_large = work.items * most_keys >= _LARGE
        own = 0 if is_large else most_keys * (d + width)
        each = own + _ROOM * (d + _LINE + width + 2 + _LANES) + max(d, dv)
        self.kept: list[Any] = [q, k, v, out, lse, highest, sink, work]
        packed_k, packed_v, scratch = (self._floats(n, q.device) for n in (keys * d, keys * width, threads * each))
        statistic = lse if lse is not None else highest
        self.numbers = dict.fromkeys(FIELDS, 0) | {
            "parallel": build.parallel_address(), "threads": threads, "items": work.items, "pack_items": pairs if is_large else 0,
            "kind": KINDS[q.dtype], "d": d, "dv": dv, "ratio": problem.qhead_per_kvhead, "heads_kv": problem.heads_kv,
            "scale": struct.unpack("q", struct.pack("d", problem.scale))[0], "scratch_size": each, "own_size": own,
            "packed_k": packed_k, "packed_v": packed_v, "scratch": scratch, "record_count": work.record_count,
            "predicates": len(problem.predicates),
        }  # fmt: skip
        for name, t in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse), ("highest", highest), ("sink", sink)):
            self.numbers[name] = 0 if t is None else t.data_ptr()
        for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
            self.numbers.update(zip((f"{name}_b", f"{name}_h", f"{name}_s", f"{name}_d"), t.stride(), strict=True))
        if statistic is not None:
            self.numbers["stat_b"], self.numbers["stat_h"] = statistic.stride()[:2]
        self.point("states", array("i", bytes(4 * pairs)))
        for name in ("entries", "records", "segments", "ranges"):
            self.point(name, getattr(work, name))

    def _floats(self, count: int, device: torch.device) -> int:
        self.kept.append(workspace.empty((max(count, 1),), torch.float32, device))
        return self.kept[-1].data_ptr()  # type: ignore[no-any-return]

    def point(self, name: str, numbers: array) -> None:
        self.kept.append(numbers)
        self.numbers[name] = numbers.buffer_info()[0]

    def address(self) -> int:
        packed = array("q", self.numbers.values())
        self.kept.append(packed)
        return packed.buffer_info()[0]
