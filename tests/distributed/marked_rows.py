"""Programs whose mods capture tensors of a rank's rows alone, marked by ``plan.rows``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from tests.distributed.uses import HEADS, S, _close, mask_of, tensors, whole
from tests.support import compiling
from tests.support.ranks import message_of

__all__ = ["MISTAKES"]


def _numbers(length: int = S) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: a bias of every key (S, S), a temperature by head (heads, S), and the number of keys that it sees before itself."""
    g = torch.Generator().manual_seed(5)
    bias, heat = torch.randn(length, length, generator=g, device="cpu"), torch.rand(HEADS, length, generator=g, device="cpu") + 0.5
    return bias, heat, torch.randint(1, 90, (length,), generator=g, device="cpu")


def _mods(bias: Tensor, heat: Tensor, width: Tensor) -> tuple[Callable, Callable]:
    return (lambda s, b, h, i, j: s * heat[h, i] + bias[i, j]), (lambda b, h, i, j: i - j < width[i])


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Any, mods: tuple[Callable, Callable], more: list[Tensor]) -> list[Tensor]:
    leaves = [*[t.detach().requires_grad_() for t in (q, k, v)], *more]
    out = anyattn.flex_attention(*leaves[:3], mods[0], mask, enable_gqa=True, mask_mod=mods[1])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def results(mesh: Any, options: dict[str, Any], is_dealt: bool) -> list[bool]:
    """Out and all gradients against one process. is_dealt: chunks are dealt in turn, so that a rank has many intervals of rows."""
    q, k, v = tensors()
    bias, heat, width = _numbers()
    mask = mask_of(masks.causal(), block=4 if is_dealt else 16)
    leaves = [t.clone().requires_grad_() for t in (bias, heat)]
    want = _run(q, k, v, mask, _mods(*leaves, width), leaves)
    plan = ad.plan(mask, mesh, **options)
    if is_dealt:
        owner = torch.arange(len(plan._placement.owner), device="cpu").numpy() % mesh.size()
        plan = type(plan)(plan._masks, plan._demands, plan._placement._replace(owner=owner), plan.ranks, plan.chunk, plan._options).to(mesh)
    local = [plan.shard(bias, dim=0).requires_grad_(), plan.shard(heat).requires_grad_()]
    marked = plan.rows(local[0]), plan.rows(local[1], dim=-1), plan.rows(plan.shard(width, dim=0))
    out, dq, dk, dv, dbias, dheat = _run(*plan.shard(q, k, v, dim=2), plan.mask, _mods(*marked), local)
    got = [*whole(plan, [out, dq, dk, dv]), plan.unshard(dbias, dim=0), plan.unshard(dheat)]
    return [_close(a, b) for a, b in zip(got, want, strict=True)]


def in_a_mode(mesh: Any) -> list[bool]:
    """The call as its operator, and with the tensors among ``aux_tensors``."""
    q, k, v = tensors()
    plan = ad.plan(mask_of(masks.causal()), mesh)
    local, bias = plan.shard(q, k, v, dim=2), plan.rows(plan.shard(_numbers()[0], dim=0))

    def call(**more: Any) -> Tensor:
        aux = (lambda s, b, h, i, j, aux: s + aux[0][i, j]) if more else lambda s, b, h, i, j: s + bias[i, j]
        return anyattn.flex_attention(*local, aux, plan.mask, enable_gqa=True, **more)

    with FlopCounterMode(display=False):
        in_mode = call()
    return [torch.equal(in_mode, call()), torch.equal(call(aux_tensors=[bias]), call())]


def one_rank(mesh: Any) -> bool:
    t = torch.ones(S, device="cpu")
    return ad.plan(mask_of(masks.causal()), mesh).rows(t) is t


def compiled(mesh: Any, backend: str) -> tuple[bool, int]:
    """Whether a compiled layer agrees with the eager one over several plans, and the number of compilations."""
    call, counter = compiling.fresh(_layer, backend)
    agree = True
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        ids = (torch.rand(256, generator=g, device="cpu") < 5 / 256).cumsum(0)
        plan = ad.plan(mask_of(masks.document(ids) & masks.causal(), 256), mesh)
        x = plan.shard(torch.randn(1, 256, 64, generator=g, device="cpu"))
        w, u = (torch.randn(64, n, generator=g, device="cpu") / 8 for n in (192, 4))
        leaves = [t.detach().requires_grad_() for t in (x, w, u)]
        agree = compiling.nearly_same(call, _layer, (*leaves, plan.mask), leaves) and agree
    return agree, counter.frame_count


def _layer(x: Tensor, w: Tensor, u: Tensor, mask: Any) -> Tensor:
    """Self-attention of four heads with a learned temperature and a window of each row."""
    q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    heat = mask.plan.rows((x[0] @ u).sigmoid())
    width = mask.plan.rows(x[0, :, 0] * 64 + 32, dim=0)
    out = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s * heat[i, h], mask, mask_mod=lambda b, h, i, j: i - j < width[i])
    return out.transpose(1, 2).flatten(2)


def marked_outside_of_compiled_code(mesh: Any, wants_grad: bool) -> bool:
    """Whether the results are right or the call raises: a graph's input may lose its mark."""
    q, k, v = tensors()
    plan = ad.plan(mask_of(masks.causal()), mesh)
    local, leaf = plan.shard(q, k, v, dim=2), plan.shard(_numbers()[0], dim=0).requires_grad_(wants_grad)
    bias = plan.rows(leaf)

    def layer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Any) -> Tensor:
        return anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j], mask, enable_gqa=True)

    call, _ = compiling.fresh(layer)
    agree = []
    args, sources = (*local, bias, plan.mask), [leaf] if wants_grad else []
    text = message_of(lambda: agree.append(compiling.nearly_same(call, layer, args, sources)))
    return agree == [True] or "reads dimension 0 of a captured tensor of shape" in text


# ---- mistakes


def _attend(mesh: Any, score: Callable[[Tensor], Callable] | None, mask: Callable[[Tensor], Callable] | None = None, shift: int = 0) -> Any:
    """A call with mods of a marked bias (rows, S). shift: the bias has the rows of a plan with other rows."""
    q, k, v = tensors()
    plan = ad.plan(mask_of(masks.causal()), mesh)
    other = ad.plan(mask_of(masks.sliding_window(8, 0)), mesh) if shift else plan
    bias = other.rows(other.shard(_numbers()[0], dim=0))
    mods = [None if mod is None else mod(bias) for mod in (score, mask)]
    return anyattn.flex_attention(*plan.shard(q, k, v, dim=2), mods[0], plan.mask, enable_gqa=True, mask_mod=mods[1])


def by_key(mesh: Any) -> Any:
    return _attend(mesh, lambda t: lambda s, b, h, i, j: s + t[j, i])


def by_the_next_row(mesh: Any) -> Any:
    return _attend(mesh, lambda t: lambda s, b, h, i, j: s + t[(i + 1).clamp(max=S - 1), j])


def by_a_number(mesh: Any) -> Any:
    return _attend(mesh, None, lambda t: lambda b, h, i, j: t[0, j] < 0)


def of_another_plan(mesh: Any) -> Any:
    return _attend(mesh, lambda t: lambda s, b, h, i, j: s + t[i, j], shift=1)


def in_a_plans_mask(mesh: Any) -> Any:
    q, k, v = tensors()
    plan = ad.plan(mask_of(masks.causal()), mesh)
    width = plan.rows(plan.shard(_numbers()[2], dim=0))
    lists = torch.ones(13, 13, dtype=torch.bool, device="cpu")
    mask = anyattn.BlockMask.from_block_map(lists, BLOCK_SIZE=16, seq_lengths=(S, S), mask_mod=lambda b, h, i, j: i - j < width[i])
    return anyattn.flex_attention(*plan.shard(q, k, v, dim=2), None, plan.also(mask), enable_gqa=True)


def where_heads_travel(mesh: Any) -> Any:
    q, k, v = tensors()
    plan = ad.plan(mask_of(masks.causal()), mesh, transport="heads")
    heat = plan.rows(plan.shard(_numbers()[2], dim=0))
    return anyattn.flex_attention(*plan.shard(q, k, v, dim=2), lambda s, b, h, i, j: s * heat[i], plan.mask, enable_gqa=True)


def of_the_whole_sequence(mesh: Any) -> Any:
    return ad.plan(mask_of(masks.causal()), mesh).rows(_numbers()[0])


def without_a_mark(mesh: Any) -> Any:
    return _attend(mesh, lambda t: lambda s, b, h, i, j, t=t * 2: s + t[i, j])


MISTAKES: dict[Callable[[Any], Any], str] = {
    by_key: "ModError: score_mod '<lambda>' indexes dimension 0 of a captured tensor of shape",
    by_the_next_row: "by something else than q_idx itself; wanted q_idx there, or plan.gather(t, dim=0)",
    by_a_number: "ModError: mask_mod '<lambda>' indexes dimension 0 of a captured tensor of shape",
    of_another_plan: "wanted rows of the same plan",
    in_a_plans_mask: "ModError: mask_mod '<lambda>' of a plan's mask captures a tensor of plan.rows",
    where_heads_travel: "ModError: score_mod '<lambda>' captures a tensor of plan.rows, but the plan sends heads",
    of_the_whole_sequence: "a tensor of shape (203, 203) has 203 rows in dimension 0; wanted the",
    without_a_mark: "reads dimension 0 of a captured tensor of shape",
}
