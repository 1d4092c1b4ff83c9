"""Programs of users that ranks run: each returns what the test judges."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import anyattn
from anyattn import autograd, masks, planner, scores
from anyattn import distributed as ad
from anyattn.call_cache.attention import FlexCall, flex_call
from anyattn.distributed import share
from tests.distributed.programs import summed
from tests.support.ranks import message_of

S, HEADS = 203, 4


def tensors(seed: int = 0, length: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v of the whole sequence, in the stride order (B, S, H, D) of models."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, n, 16, generator=g, device="cpu").to(dtype).transpose(1, 2) for n in (HEADS, 2, 2)]


def mask_of(mod: Callable, length: int = S, block: int = 16) -> Any:
    return anyattn.create_block_mask(mod, None, None, length, length, device="cpu", BLOCK_SIZE=block)


def run(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any = None, **options: Any) -> list[Tensor]:
    """out, lse and the gradients of q, k, v of a loss that weighs all rows alike."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = anyattn.flex_attention(*leaves, score, mask, enable_gqa=True, return_lse=True, **options)
    (out.square().sum() + lse.sum()).backward()
    return [out.detach(), lse.detach(), *[t.grad for t in leaves]]  # type: ignore[misc]


def whole(plan: Any, results: list[Tensor]) -> list[Tensor]:
    return [plan.unshard(t, dim=2) for t in results]


def same_bits(mesh: Any, dtype: torch.dtype, transport: str) -> list[bool]:
    """Of out, lse and the gradients, without overlap, against one process."""
    # with fewer heads a CPU's BLAS may add in another order; compiled loops (float32, from 2^18 scores on) compute each head alone
    length = S if transport == "keys" else 520
    q, k, v = tensors(length=length, dtype=dtype)
    mask = mask_of(masks.causal(), length)
    plan = ad.plan(mask, mesh, overlap=False, transport=transport)
    options = {"kernel_options": {"tile_m": 16, "tile_n": 16}}
    got = whole(plan, run(*plan.shard(q, k, v, dim=2), plan.mask, **options))
    return [torch.equal(a, b) for a, b in zip(got, run(q, k, v, mask, **options), strict=True)]


def summed_in_float32(mesh: Any) -> list[bool]:
    """A K/V head in 16 bits that all ranks have: whether its gradients are the ranks' sums in float32, in their order, rounded once."""
    q, k, v = (t[:, :n] for t, n in zip(tensors(dtype=torch.bfloat16), (HEADS, 1, 1), strict=True))
    mask, parts = mask_of(masks.causal()), q.chunk(mesh.size(), 1)
    plan = ad.plan(mask, mesh, transport="heads")
    local = [t.detach().requires_grad_() for t in plan.shard(q, k, v, dim=2)]
    out = anyattn.flex_attention(*local, None, plan.mask, enable_gqa=True)
    got = whole(plan, list(torch.autograd.grad(out, local[1:], torch.ones_like(out))))
    sums: list[Tensor] = []
    for part in parts:
        leaves = [t.detach().requires_grad_() for t in (part, k, v)]
        call = FlexCall(*leaves, None, mask, None, None, None, True, None, True, False, False)
        problem, chosen = flex_call(call, None, None, is_operator=True)  # type: ignore[misc]
        with torch.no_grad():
            found = autograd.forward(problem, chosen)
            grads = autograd.backward(problem.like(wide_kv_grads=True), chosen, found.out, found.lse, torch.ones_like(found.out), None)
        sums = [a + b for a, b in zip(sums, grads[1:3], strict=True)] if sums else list(grads[1:3])  # type: ignore[arg-type]
    return [torch.equal(a, b.to(a.dtype)) for a, b in zip(got, sums, strict=True)] + [b.dtype is torch.float32 for b in sums]


def same_as_without_nodes(mesh: Any, node_size: int, dtype: torch.dtype) -> list[bool]:
    """Whether keys are passed on, and of out, lse and the gradient of q, with and without overlap, whether they have the bits of the same
    rows' with messages straight from rank to rank."""
    found = []
    for overlap in (False, True):
        plan = ad.plan(mask_of(masks.causal()), mesh, overlap=overlap, node_size=node_size)
        options = plan._options._replace(costs=plan._options.costs._replace(node_size=None))
        straight = type(plan)(plan._masks, plan._demands, plan._placement, plan.ranks, plan.chunk, options).to(mesh)
        local = plan.shard(*tensors(dtype=dtype), dim=2)
        results = [run(*local, each.mask) for each in (plan, straight)]
        found += [plan.mask.share.messages == 2, straight.mask.share.messages == 1]
        found += [torch.equal(a, b) for a, b in zip(*results, strict=True)][:3]
    return found


def nodes_of_torchrun(mesh: Any) -> list[Any]:
    """The sizes of nodes that new groups find in LOCAL_WORLD_SIZE of 4 ranks: the same on all; other sizes on one; only on one; a group of
    every other rank, and a size that is passed instead."""
    rank, found = mesh.get_local_rank(), []
    cases: tuple[tuple[str, Any, int | None], ...] = (
        ("2", None, None),
        ("24"[rank == 3], None, None),
        (("", "2")[rank == 0], None, None),
        ("2", (rank % 2, rank % 2 + 2), None),
        ("2", None, 4),
    )
    for text, members, node_size in cases:
        os.environ["LOCAL_WORLD_SIZE"] = text
        everyone = [dist.new_group(ranks) for ranks in ([[0, 2], [1, 3]] if members else [None])]
        group = everyone[rank % 2 if members else 0]
        found.append(ad.plan(mask_of(masks.causal()), group, node_size=node_size).node_size)
        del os.environ["LOCAL_WORLD_SIZE"]
    return found


def reruns(mesh: Any, transport: str = "keys", node_size: int | None = None) -> bool:
    """Whether two runs give the same bits, gradients included."""
    q, k, v = tensors()
    ids = torch.arange(S, device="cpu") // 150
    plan = ad.plan(mask_of(masks.document(ids) & masks.causal()), mesh, transport=transport, node_size=node_size)
    assert plan.mask.share.messages == (1 if transport == "keys" and node_size is None else 2)
    a, b = (run(*plan.shard(q, k, v, dim=2), plan.mask, deterministic=True) for _ in range(2))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def ways(mesh: Any, transport: str = "keys") -> dict[str, float]:
    """The greatest difference of other ways to write the same call from the first."""
    q, k, v = tensors()
    slopes = torch.linspace(0.1, 0.4, HEADS, device="cpu")
    plan = ad.plan(mask_of(masks.causal()), mesh, transport=transport)
    local = plan.shard(q, k, v, dim=2)

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    def with_aux(s: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return s - aux[0][h] * (i - j)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flex_attention(q, k, v, alibi, plan.mask, enable_gqa=True)

    def checkpointed(**options: Any) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in local]
        out = checkpoint.checkpoint(layer, *leaves, use_reentrant=False, **options)
        out.square().sum().backward()
        return [out.detach(), *[t.grad for t in leaves]]

    def selective() -> Any:
        keep = [torch.ops.anyattn.attend_sharded.default]
        return checkpoint.create_selective_checkpoint_contexts(keep)

    leaves = [t.detach().requires_grad_() for t in local]
    wide = plan.also(masks.sliding_window(S, S))
    out = layer(*leaves)
    out.square().sum().backward()
    first = [out.detach(), *[t.grad for t in leaves]]
    others = {
        "in a dispatch mode": [_counted(lambda: layer(*local))],
        "checkpoint": checkpointed(),
        "selective checkpoint": checkpointed(context_fn=selective),
        "contiguous": [anyattn.flex_attention(*[t.contiguous() for t in local], alibi, plan.mask, enable_gqa=True)],
        "aux_tensors": [anyattn.flex_attention(*local, with_aux, plan.mask, enable_gqa=True, aux_tensors=[slopes])],
        "library": [anyattn.flex_attention(*local, scores.alibi(slopes), plan.mask, enable_gqa=True)],
        "no grad": [_without_grad(lambda: layer(*local))],
        "mask_mod too": [anyattn.flex_attention(*local, alibi, wide, mask_mod=masks.causal(), enable_gqa=True)],
        "pickled": [anyattn.flex_attention(*local, alibi, _sent(mesh, transport).mask, enable_gqa=True)],
    }
    return {name: max(float((a - b).abs().max()) for a, b in zip(found, first)) for name, found in others.items()}


def _without_grad(call: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return call()


def _counted(call: Callable[[], Tensor]) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        out = call()
    assert counter.get_total_flops() == 4 * out.numel() * S, (counter.get_total_flops(), counter.flop_counts, out.shape)
    return out


def _sent(mesh: Any, transport: str) -> Any:
    """A plan that a data loader's worker has made."""
    made = ad.plan(mask_of(masks.causal()), ranks=mesh.size(), transport=transport)
    return pickle.loads(pickle.dumps(made)).to(mesh)


def several_masks(mesh: Any, transport: str = "keys") -> list[bool]:
    """Of two masks with one placement: whether each layer's results are those of one process, and whether the rows are the same."""
    q, k, v = tensors()
    both = {"full": mask_of(masks.causal()), "window": mask_of(masks.sliding_window(30, 0))}
    plan = ad.plan(both, mesh, weights={"full": 1, "window": 5}, transport=transport)
    local = plan.shard(q, k, v, dim=2)
    found = []
    for name, mask in both.items():
        got = whole(plan, run(*local, plan.mask[name]))
        found.append(all(_close(a, b) for a, b in zip(got, run(q, k, v, mask), strict=True)))
    later = mask_of(masks.prefix_lm(20), block=8)
    got = whole(plan, run(*local, plan.also(later)))
    found.append(all(_close(a, b) for a, b in zip(got, run(q, k, v, later), strict=True)))
    return [*found, torch.equal(plan.unshard(plan.positions, dim=0), torch.arange(S, device="cpu"))]


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= 64 * torch.finfo(a.dtype).eps * float(b.abs().max())


def tensor_parallel(mesh: Any, transport: str = "keys") -> list[bool]:
    """The upper half of the heads alone, as a tensor-parallel rank has them: whether mods see global heads."""
    q, k, v = tensors()
    slopes = torch.linspace(0.1, 0.4, HEADS, device="cpu")

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    mask = mask_of(masks.causal())
    plan = ad.plan(mask, mesh, head_offset=HEADS // 2, transport=transport)
    got = whole(plan, run(*plan.shard(q[:, HEADS // 2 :], k[:, 1:], v[:, 1:], dim=2), plan.mask, alibi))
    want = run(q, k, v, mask, alibi)
    return [_close(a, b[:, -a.shape[1] :]) for a, b in zip(got, want, strict=True)]


def gathered(mesh: Any, transport: str = "keys") -> list[bool]:
    """A learned number of each token that the model computes on the shard and a mod captures for all: results and its gradient."""
    q, k, v = tensors()
    x = torch.linspace(-1, 1, S, device="cpu")
    mask = mask_of(masks.causal())
    plan = ad.plan(mask, mesh, transport=transport)
    grads, outs = [], []
    for is_shard in (True, False):
        leaf = (plan.shard(x, dim=0) if is_shard else x).clone().requires_grad_()
        gate = plan.gather(leaf * 2) if is_shard else leaf * 2
        local = plan.shard(q, k, v, dim=2) if is_shard else (q, k, v)
        out = anyattn.flex_attention(*local, _gate(gate), plan.mask if is_shard else mask, enable_gqa=True)
        out.square().sum().backward()
        outs.append(plan.unshard(out.detach(), dim=2) if is_shard else out.detach())
        grads.append(plan.unshard(leaf.grad, dim=0) if is_shard else leaf.grad)
    return [_close(*outs), _close(*grads)]


def _gate(gate: Tensor) -> Callable:
    return lambda s, b, h, i, j: s + gate[j] * gate[i]


def one_rank(mesh: Any) -> list[bool]:
    """On one rank, with and without a group: the same bits, and the mask itself."""
    q, k, v = tensors()
    mask = mask_of(masks.causal())
    found = []
    for plan in (ad.plan(mask, mesh), ad.plan(mask, ranks=1)):
        got = whole(plan, run(*plan.shard(q, k, v, dim=2), plan.mask))
        found += [plan.mask is mask, *[torch.equal(a, b) for a, b in zip(got, run(q, k, v, mask), strict=True)]]
    return found


def rebound(mesh: Any, transport: str = "keys") -> list[bool]:
    """A mask's captured number and tensor change after the first call: whether later calls read them, and written tensors raise."""
    q, k, v = tensors()
    state: dict[str, Any] = {}

    def make(width: int, ids: Tensor) -> Callable:
        def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (i - j < width) & (ids[i] == ids[j])

        def set_to(new_width: int, new_ids: Tensor) -> None:
            nonlocal width, ids
            width, ids = new_width, new_ids

        state["set"] = set_to
        return mod

    ids = torch.arange(S, device="cpu") // 60
    mask = mask_of(make(40, ids))
    plan = ad.plan(mask, mesh, transport=transport)
    local, found = plan.shard(q, k, v, dim=2), []
    for change in ((40, ids), (33, ids), (33, ids % 2)):
        state["set"](*change)
        got = whole(plan, run(*local, plan.mask))
        found.append(all(_close(a, b) for a, b in zip(got, run(q, k, v, mask), strict=True)))
    ids_now = ids % 2
    state["set"](33, ids_now)
    out = anyattn.flex_attention(*[t.detach().requires_grad_() for t in local], None, plan.mask, enable_gqa=True)
    ids_now.zero_()
    return [*found, "modified by an inplace operation" in message_of(lambda: out.sum().backward())]


def shared_keys(mesh: Any, transport: str = "keys") -> list[bool]:
    """Keys of one batch entry for two of queries; and a mask whose ids end before the sequence does."""
    q, k, v = tensors()
    q = torch.cat((q, q.flip(2)))
    mask = mask_of(masks.causal())
    plan = ad.plan(mask, mesh, transport=transport)
    got = whole(plan, run(*plan.shard(q, k, v, dim=2), plan.mask))
    found = [_close(a, b) for a, b in zip(got, run(q, k, v, mask), strict=True)]
    ids = torch.arange(150, device="cpu") // 40
    short = anyattn.BlockMask.from_block_map(
        torch.ones(13, 13, dtype=torch.bool, device="cpu"), BLOCK_SIZE=16, seq_lengths=(S, S),
        mask_mod=lambda b, h, i, j: (i < 150) & (j < 150) & (ids[i] == ids[j]),
    )  # fmt: skip
    plan = ad.plan(short, mesh, transport=transport)
    q = q[:1]
    got = whole(plan, run(*plan.shard(q, k, v, dim=2), plan.mask)[:1])
    return [*found, _close(got[0], run(q, k, v, short)[0])]


def by_head(mesh: Any, transport: str = "keys") -> list[bool]:
    """A mask that reads h, with lists of one head for all and of each head, and beside it for the upper half of the heads."""
    q, k, v = tensors()

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i == j) | ((i > j) & ((i - j) % 3 != h % 3))

    shared = mask_of(mod)
    each = anyattn.create_block_mask(mod, None, HEADS, S, S, device="cpu", BLOCK_SIZE=16)
    found = []
    for mask in (shared, each):
        plan = ad.plan(mask, mesh, transport=transport)
        got = whole(plan, run(*plan.shard(q, k, v, dim=2), plan.mask, mask_mod=mod))
        found += [_close(a, b) for a, b in zip(got, run(q, k, v, mask), strict=True)]
    plan = ad.plan(shared, mesh, head_offset=HEADS // 2, transport=transport)
    got = whole(plan, run(*plan.shard(q[:, HEADS // 2 :], k[:, 1:], v[:, 1:], dim=2), plan.mask))
    return [*found, *[_close(a, b[:, -a.shape[1] :]) for a, b in zip(got, run(q, k, v, shared), strict=True)]]


def wanted(mesh: Any, transport: str) -> dict[str, bool]:
    """Calls that want other results and other gradients than most, against one process."""
    q, k, v = tensors()
    slopes, sink = (torch.linspace(0.1, 0.4, HEADS, device="cpu") for _ in range(2))
    mask = mask_of(masks.causal())
    plan = ad.plan(mask, mesh, transport=transport)
    first = torch.zeros(S, dtype=torch.bool, device="cpu")  # rows of rank 0
    for start, stop in plan.rows_of(0):
        first[start:stop] = True

    def grads(wants: str, is_shard: bool, of_lse: bool = False) -> list[Tensor]:
        given = {"q": q, "k": k, "v": v, "slopes": slopes, "sink": sink}
        for name in "qkv":
            given[name] = plan.shard(given[name], dim=2) if is_shard else given[name]
        leaf = given[wants] = given[wants].detach().requires_grad_()
        table = given["slopes"]
        out, lse = anyattn.flex_attention(
            given["q"], given["k"], given["v"], lambda s, b, h, i, j: s - table[h] * (i - j), plan.mask if is_shard else mask,
            enable_gqa=True, sink=given["sink"], return_lse=True,
        )  # fmt: skip
        loss = out.square().sum()
        if of_lse and not is_shard:
            loss = loss + lse[:, :, first].sum()
        elif of_lse and mesh.get_local_rank() == 0:
            loss = loss + lse.sum()
        loss.backward()
        assert leaf.grad is not None
        if not is_shard:
            return [leaf.grad]
        return [plan.unshard(leaf.grad, dim=2) if wants in "qkv" else summed(leaf.grad, mesh)]

    def results(is_shard: bool, **options: Any) -> list[Tensor]:
        local = plan.shard(q, k, v, dim=2) if is_shard else (q, k, v)
        request = anyattn.AuxRequest(lse=True, max_scores=True)
        out, aux = anyattn.flex_attention(*local, None, plan.mask if is_shard else mask, enable_gqa=True, return_aux=request, **options)
        found = [out, aux.lse, aux.max_scores]
        return whole(plan, found) if is_shard else found

    def cast(is_shard: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return results(is_shard)

    programs: dict[str, Callable[[bool], list[Tensor]]] = {
        **{f"gradient of {name} alone": partial(grads, name) for name in ("q", "k", "v", "slopes", "sink")},
        "lse in the loss of one rank": partial(grads, "k", of_lse=True),
        "max_scores": results,
        "scale": partial(results, scale=0.7),
        "autocast": cast,
    }
    both = {name: zip(program(True), program(False), strict=True) for name, program in programs.items()}
    return {name: all(_close(a, b) for a, b in found) for name, found in both.items()}


def many_intervals(mesh: Any) -> list[bool]:
    """Rows in more intervals than are compared, under a mask that joins them in one call, with learned tables in the score."""
    q, k, v = tensors()
    tables = [torch.linspace(-1, 1, n, device="cpu").requires_grad_() for n in (S, 2 * S)]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * torch.sigmoid(tables[0][i]) + tables[1][i - j + S]

    mask = mask_of(masks.causal(), block=4)
    plan = ad.plan(mask, mesh)
    owner = torch.arange(len(plan._placement.owner), device="cpu").numpy() % mesh.size()
    plan = type(plan)(plan._masks, plan._demands, plan._placement._replace(owner=owner), plan.ranks, plan.chunk, plan._options).to(mesh)
    grads = []
    for is_shard in (True, False):
        for t in tables:
            t.grad = None
        local = plan.shard(q, k, v, dim=2) if is_shard else (q, k, v)
        run(*local, plan.mask if is_shard else mask, score)
        grads.append([t.grad.clone() for t in tables])
    return [_close(summed(a, mesh), b) for a, b in zip(*grads, strict=True)]


def second_derivative_of_gathered(mesh: Any) -> str:
    plan = ad.plan(mask_of(masks.causal()), mesh)
    leaf = plan.shard(torch.linspace(0, 1, S, device="cpu"), dim=0).requires_grad_()
    (grad,) = torch.autograd.grad((plan.gather(leaf) ** 3).sum() + (leaf**2).sum(), leaf, create_graph=True)
    return message_of(lambda: grad.pow(2).sum().backward())


def lists_written(mesh: Any, transport: str) -> tuple[bool, str]:
    """Whether a second backward pass repeats the gradients after a write to the mask's lists, False if it raises; and its message."""
    q, k, v = tensors()
    plan = ad.plan(mask_of(masks.causal()), mesh, transport=transport)
    local = [t.detach().requires_grad_() for t in plan.shard(q, k, v, dim=2)]
    out = anyattn.flex_attention(*local, None, plan.mask, enable_gqa=True)
    found = [torch.autograd.grad(out.sum(), local, retain_graph=True)]
    plan.mask.q_num_blocks.sub_(1).clamp_(min=0)
    plan.mask.kv_num_blocks.sub_(1).clamp_(min=0)
    text = message_of(lambda: found.append(torch.autograd.grad(out.sum(), local)))
    return all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True)) and len(found) == 2, text


def own_keys_around_a_gap(mesh: Any) -> list[bool]:
    """Rows of a document that see own keys on both sides of another rank's, which none of them needs, so that no key travels: whether rows
    are sequences, and whether their results are those of one process."""
    share.RUN_DOCUMENTS.append("cpu")
    try:
        ids = torch.zeros(1024, dtype=torch.int64, device="cpu")
        far = mask_of(lambda b, h, q, k: (ids[q] == ids[k]) & ((q == k) | (q - k == 768)), 1024)
        plan = ad.plan(mask_of(masks.causal(), 1024), mesh)
        shard: Any = plan.also(far)
        found = [shard.share.by_documents is not None, not shard.share.messages]
        whole_tensors = tensors(length=1024)
        got = whole(plan, run(*plan.shard(*whole_tensors, dim=2), shard))
        return [*found, *[_close(a, b) for a, b in zip(got, run(*whole_tensors, far), strict=True)]]
    finally:
        share.RUN_DOCUMENTS.remove("cpu")


class _Subclass(Tensor):
    pass


def plans_of_documents(mesh: Any) -> tuple[list[int], bool, int]:
    """How many plans a share has after calls with slopes side by side, the same again, and slopes with gaps; whether a query of a subclass
    gives the bits of a plain one; and the most that is kept, of at most 6, over calls of other scales. The plans are taken for ones of
    kernels, which serve several calls."""
    share.RUN_DOCUMENTS.append("cpu")
    most, share._MOST_KEPT = share._MOST_KEPT, 6
    planned = planner.planned
    planner.planned = lambda *given: replace(planned(*given), is_reusable=True)
    try:
        plan = ad.plan(mask_of(masks.document(torch.arange(S, device="cpu") // 50)), mesh)
        q, k, v = plan.shard(*tensors(), dim=2)
        kept = plan.mask.share.kept

        def call(query: Tensor, slopes: Tensor, **options: Any) -> Tensor:
            score = scores.alibi(slopes)
            return anyattn.flex_attention(query, k, v, score, plan.mask, enable_gqa=True, **options)  # type: ignore[no-any-return]

        table, counts, sizes = torch.linspace(0.1, 0.4, 2 * HEADS, device="cpu"), [], []
        for slopes in (table[:HEADS], table[:HEADS], table[::2]):
            out = call(q, slopes)
            counts.append(sum(key[0] == "plan" for key in kept))
        is_same = torch.equal(call(q.as_subclass(_Subclass), table[::2]), out)
        for i in range(9):
            call(q, table[:HEADS], scale=0.1 + i)
            sizes.append(len(kept))
        return counts, is_same, max(sizes)
    finally:
        share._MOST_KEPT, planner.planned = most, planned
        share.RUN_DOCUMENTS.remove("cpu")


def freed(mesh: Any) -> list[bool]:
    """Whether a plan's mask and its share die with it and with the graph of a call, without the garbage collector."""
    found = []
    gc.collect()
    gc.disable()
    try:
        for transport in ("keys", "heads"):
            plan = ad.plan(mask_of(masks.causal()), mesh, transport=transport)
            local = [t.requires_grad_() for t in plan.shard(*tensors(), dim=2)]
            anyattn.flex_attention(*local, block_mask=plan.mask, enable_gqa=True).sum().backward()
            refs = [weakref.ref(plan.mask), weakref.ref(plan.mask.share)]
            del plan, local
            found += [ref() is None for ref in refs]
    finally:
        gc.enable()
    return found


def inference_ids(mesh: Any) -> list[bool]:
    """Gradients under a mask of ids that were made in inference mode, where a rank may have no rows."""
    with torch.inference_mode():
        ids = torch.arange(20, device="cpu") // 9
    mask = mask_of(masks.causal() & masks.document(ids), 20)
    plan = ad.plan(mask, mesh)
    given = tensors(length=20)
    got = whole(plan, run(*plan.shard(*given, dim=2), plan.mask))
    return [_close(a, b) for a, b in zip(got, run(*given, mask), strict=True)]
