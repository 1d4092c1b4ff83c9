"""Forward pass by compiled loops: the arguments of the C++ function, and its call."""

from __future__ import annotations

from array import array

import torch

from anyattn.backends.result import Result
from anyattn.backends.torch.compiled import build
from anyattn.backends.torch.compiled.arguments import LANES, LINE, ROOM, Arguments
from anyattn.backends.torch.compiled.decision import loops, mods
from anyattn.backends.torch.compiled.kernel import ENTRY
from anyattn.backends.torch.compiled.work import Work
from anyattn.backends.torch.mod_runner import bind
from anyattn.problem import Problem

__all__ = ["forward"]

_LARGE = 2**19  # items x keys: of 64 rows


def forward(problem: Problem, work: Work, result: Result) -> bool:
    """Writes the tensors of ``result``. False if nothing could be compiled, or a mod read a captured tensor outside of its size."""
    found = loops(problem)
    function = None if isinstance(found, str) else build.function_of(found.text)
    if function is None or isinstance(found, str):
        return False
    bounds = {at: bind(m.expr, m.scalars, m.tensors, problem, problem.is_batch_invariant) for at, m in mods(problem).items()}
    arguments = Arguments(problem, work, problem.q)
    _add_forward(arguments, problem, work, result)
    arguments.values(found, bounds)
    return function(arguments.address()) == 0


def _add_forward(arguments: Arguments, problem: Problem, work: Work, result: Result) -> None:
    d, pairs = problem.q.shape[3], problem.batch * problem.heads_kv
    most_keys, keys = max(work.entries[ENTRY.index("packed_keys") :: len(ENTRY)]), work.packed_keys * problem.heads_kv
    # copies before everything else are made by all threads at once, but a second parallel region waits once more for a busy core
    is_large = work.items * most_keys >= _LARGE
    own = 0 if is_large else most_keys * (d + arguments.wide_v)
    each = own + ROOM * (d + LINE + arguments.wide_v + 2 + LANES) + max(d, problem.v.shape[3])
    arguments.numbers |= {
        "items": work.items, "pack_items": pairs if is_large else 0, "own_size": own, "scratch_size": each,
        "packed_k": arguments.floats(keys * d), "packed_v": arguments.floats(keys * arguments.wide_v),
        "scratch": arguments.floats(arguments.numbers["threads"] * each),
    }  # fmt: skip
    arguments.tensor("out", result.out)
    arguments.point("states", array("i", bytes(4 * pairs)))
    for name, t in (("lse", result.lse), ("highest", result.max_scores)):
        if t is not None:
            arguments.numbers[name] = arguments.keep(t).data_ptr()
            arguments.numbers["stat_b"], arguments.numbers["stat_h"] = t.stride()[:2]
    if problem.sink is not None:
        arguments.numbers["sink"] = arguments.keep(problem.sink.detach().to(torch.float32).contiguous()).data_ptr()
