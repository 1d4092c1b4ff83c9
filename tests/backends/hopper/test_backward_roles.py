"""The backward kernel's text on the CPU: gradients of its roles against float64, whoever goes on when, and bugs planted in it are found."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anyattn import masks
from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper.backward_config import BackwardConfig, BackwardTiles
from anyattn.backends.hopper.config import Ask, slots
from anyattn.backends.hopper.make_backward_config import with_derivative
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.sparsity.compute import tile_lists
from tests.support.hopper.backward_roles import Call, Changes, run_grid
from tests.support.hopper.emitted import Array
from tests.support.hopper.schedule import Broken

SCALE = 0.2
MOST = 0.02  # of the greatest gradient: P, dS and the operands have 8 bits; a lost key or row is off by several times that


class Case(NamedTuple):
    """What is computed. kind: how the mask reaches the kernel, as a band, as lists with a predicate, or as a predicate alone."""

    sizes: tuple[int, int] = (150, 200)
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    mask: Any = None
    kind: str = "band"
    score: Any = None
    tiles: BackwardTiles = BackwardTiles(64, 128)
    is_deterministic: bool = False
    workers: int = 1


SLOPES = torch.tensor([0.02, -0.05])
CASES = {
    "one tile": Case((64, 128), (1, 1)),
    "full": Case(),
    "several blocks": Case((150, 300), (4, 2), batch=2, workers=3),
    "causal": Case(mask=masks.causal(), workers=2),
    "window": Case((300, 300), mask=masks.sliding_window(70, 9)),
    "left": Case((300, 300), mask=masks.sliding_window(30, None)),
    "by head": Case((200, 300), mask=lambda b, h, i, j: i >= j + 60 * h),
    "sees nothing": Case((100, 400), mask=masks.causal()),
    "large tiles": Case((300, 200), tiles=BackwardTiles(128, 128, ds_stages=1), mask=masks.causal()),
    "large tiles, two stages of dS": Case((300, 300), (2, 1), tiles=BackwardTiles(128, 128), mask=masks.sliding_window(70, 9)),
    "one stage": Case((300, 200), tiles=BackwardTiles(64, 128, 1, 1, 1)),
    "one stage of dS": Case((300, 200), tiles=BackwardTiles(64, 128, 2, 2, 1)),
    "deterministic": Case((200, 400), (2, 1), mask=masks.sliding_window(200, 9), is_deterministic=True, workers=2),
    "always": Case((150, 200), mask=masks.dilated(3, 90), kind="always"),
    "lists": Case((300, 300), mask=masks.prefix_lm(70), kind="lists"),
    "lists and a predicate": Case((300, 200), mask=lambda b, h, i, j: (i + j) % 7 < 90 - i // 3, kind="lists"),
    "softcap": Case(score=lambda s, b, h, i, j: 3 * torch.tanh(s / 3)),
    "alibi": Case(score=lambda s, b, h, i, j: s + SLOPES[h] * (i - j), mask=masks.causal()),
    "square": Case(score=lambda s, b, h, i, j: s * s * 0.3, mask=masks.dilated(2, 90), kind="always"),
}


def run(case: Case, seed: int = 0, changes: Changes = ()) -> dict[str, float]:
    """The errors of dq, dk and dv, in units of the greatest gradient."""
    (rows, keys), (heads, kv_heads), d = case.sizes, case.heads, 64
    g = torch.Generator().manual_seed(seed)
    shapes = ((case.batch, heads, rows, d), *((case.batch, kv_heads, keys, d),) * 2, (case.batch, heads, rows, d))
    q, k, v, dout = (torch.randn(shape, generator=g).bfloat16().double() for shape in shapes)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    score, mask = (None if m is None else trace(m, kind) for m, kind in ((case.score, "score"), (case.mask, "mask")))
    whole_k, whole_v = (t.repeat_interleave(heads // kv_heads, 1) for t in leaves[1:])
    s = leaves[0] @ whole_k.transpose(-1, -2) * SCALE
    place = [torch.arange(n).view([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate((case.batch, heads, rows, keys))]
    if case.score is not None:
        s = case.score(s, *place) if not score.tensors else s + SLOPES.double()[place[1]] * (place[2] - place[3])  # type: ignore[union-attr]
    seen = torch.ones(s.shape, dtype=torch.bool)
    if mask is not None:
        seen = torch.as_tensor(evaluate(mask, *place)).expand(s.shape)
    s = s.masked_fill(~seen, float("-inf"))
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    out = p @ whole_v
    wanted = torch.autograd.grad(out, leaves, dout)
    fields, mods = _masked(case, mask)
    if score is not None:
        mods.insert(0, score)
        fields["score"] = with_derivative(score.expr)
    config = BackwardConfig(d, d, True, case.tiles, is_deterministic=case.is_deterministic, **fields)
    numbers, tensors = [], []
    for mod, expr in zip(mods, config.exprs, strict=True):
        count, tensor_count = slots(expr)
        numbers += [int(x) if isinstance(x, int) else np.float32(x) for x in mod.scalars[:count]]
        tensors += [Array(t) for t in mod.tensors[:tensor_count]]
    base_2 = torch.where(lse.isinf(), float("inf"), lse * LOG2E)
    given = [t.detach().float().numpy() for t in (q, k, v, dout, base_2, (out * dout).sum(-1))]
    call = Call(config, tuple(given[:4]), given[4], given[5], SCALE, _lists(case, mask))
    dq = run_grid(call, seed, case.workers, changes, tuple(numbers), tuple(tensors))
    return {
        name: float(np.nan_to_num(np.abs(got - want.numpy()), nan=np.inf).max() / want.abs().max())
        for name, got, want in zip(("dq", "dk", "dv"), (dq, call.dk, call.dv), wanted, strict=True)
    }


def _masked(case: Case, mask: Any) -> tuple[dict[str, Any], list[Any]]:
    """The config's fields of a mask, and the mods that they are of."""
    if mask is None:
        return {}, []
    ranges = row_ranges(mask)
    if case.kind == "band":
        assert ranges is not None
        return {"bands": (ranges.expr,)}, [mask]
    ask = Ask(mask.expr, False) if ranges is None else Ask(ranges.expr, True)
    if case.kind == "always":
        return {"always": (Ask(mask.expr, False),)}, [mask]
    return {"lists": "dense", "list_cut": (128 // case.tiles.tile_m, 1), "partial": ask}, [mask]


def _lists(case: Case, mask: Any) -> tuple[Any, ...]:
    if case.kind != "lists":
        return ()
    found = tile_lists(mask, 1, 1, *case.sizes, (128, 128), torch.device("cpu"))
    turned = BlockSparseTensors(*found, tile=(128, 128), lengths=case.sizes).transposed()
    tensors = (turned.mask_block_cnt, turned.mask_block_idx, turned.full_block_cnt, turned.full_block_idx)
    return tuple(None if t is None else t.numpy() for t in tensors)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    for seed in range(3):
        errors = run(CASES[name], seed)
        assert max(errors.values()) <= MOST, errors


MMA, ADDER, SCORES, SCHEDULER, LOADER, EPILOGUE, ROWS = (
    "backward_mma", "backward_adder", "backward_scores", "backward_scheduler", "backward_producer", "backward_epilogue", "backward_rows",
)  # fmt: skip
MUTANTS: dict[str, tuple[str, Changes]] = {
    "dS is not exchanged": (
        "full",
        ((MMA, "        cute.arch.barrier(barrier_id=_EXCHANGED, number_of_threads=128 * self.config.tiles.warp_groups)\n", ""),),
    ),
    "dS is not fenced": ("full", ((MMA, '        cute.arch.fence_proxy("async.shared", space="cta")\n        cute.arch.barrier(', "        cute.arch.barrier("),)),
    "dS has one stage and nobody waits": ("one stage of dS", ((MMA, "if const_expr(self.config.tiles.ds_stages == 1):", "if const_expr(False):"),)),
    "dS stays in one stage": ("full", ((MMA, "stage = tiles.ds_stages - 1 - stage", "stage = stage"),)),
    "dQ is written before it has left": (
        "full",
        ((ADDER, "cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass"),),
    ),
    "dQ is not fenced": ("full", ((MMA, '            cute.arch.fence_proxy("async.shared", space="cta")\n', ""),)),
    "dQ is added to the first group's part": ("full", ((ADDER, ".iterator + group * size", ".iterator"),)),
    "the adder is not told of the end": ("full", ((MMA, "return Int32(-1), Int32(0)", "return Int32(0), Int32(0)"),)),
    "dQ goes to the first row tile": ("full", ((MMA, "return slot, visit.head", "return slot * 0, visit.head"),)),
    "dO is given back while it is being read": ("full", ((MMA, "        pipes[1].consumer_release(do_state)\n", ""), (MMA, "        dq = cute.make_rmem_tensor(", "        pipes[1].consumer_release(do_state)\n        dq = cute.make_rmem_tensor("))),
    "Q is not given back": ("full", ((MMA, "        pipes[0].consumer_release(q_state)\n", ""),)),
    "dP is not waited for": ("full", ((MMA, "            warpgroup.wait_group(0)\n            self.score_gradients", "            self.score_gradients"),)),
    "S is not waited for": ("full", ((MMA, "            warpgroup.wait_group(1)\n            self.probabilities", "            self.probabilities"),)),
    "dK keeps the tile before": ("several blocks", ((MMA, "                sums[0].fill(0.0)\n", "                sums[0].fill(0.0) if facts.n_block == 0 else None\n"),)),
    "dK is not scaled": ("full", ((EPILOGUE, "dk.load() * scale", "dk.load() * 1"),)),
    "K is overwritten while another group reads it": ("full", ((EPILOGUE, "        cute.arch.barrier(barrier_id=_READ, number_of_threads=128 * self.config.tiles.warp_groups)\n", ""),)),
    "K is given back while dK leaves": ("several blocks", ((EPILOGUE, "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""),)),
    "the band's right side is off by one": ("causal", ((SCORES, "< row + visit.right - key", "<= row + visit.right - key"),)),
    "masked tiles are taken for bare ones": ("causal", ((SCHEDULER, "        is_masked = Int32(1)\n        if (m >= bare_first)", "        is_masked = Int32(0)\n        if (m >= bare_first)"),)),
    "the first row tile is one too late": ("causal", ((SCHEDULER, "cutlass.max(start - right + 1, 0) // tile_m", "cutlass.max(start - right + 1, 0) // tile_m + 1"),)),
    "the last row tile is one too early": ("window", ((SCHEDULER, "ceil_div(cutlass.max(end - left, 0), tile_m)", "cutlass.max(end - left, 0) // tile_m"),)),
    "bands are the first head's": ("by head", ((LOADER, "of_head, plan = self.plan_of(n_block, head, entry", "of_head, plan = self.plan_of(n_block, 0, entry"),)),
    "a turn too many is awaited": ("deterministic", ((SCHEDULER, "        return turn\n", "        return turn + 1\n"),)),
    "turns are not passed on": ("deterministic", ((ADDER, "        cute.arch.atomic_add(turn_of_tile, Int32(1), sem=\"release\", scope=\"gpu\")\n", ""),)),
    "the derivative is left out": ("softcap", ((SCORES, "ds * Float32(derivative)", "ds"),)),
    "delta is that of the row beside": ("full", ((SCORES, "p[r, c] * (dp[r, c] - delta[c])", "p[r, c] * (dp[r, c] - delta[c ^ 1])"),)),
    "listed full tiles are the first part alone": ("lists", ((SCHEDULER, "m = full_list[(i - partials) // cut] * cut", "m = full_list[(i - partials) // cut] * 1"),)),
    "dq's halves are exchanged": ("full", ((ROWS, "column = column + group * (head_dim // 2)", "column = column + (1 - group) * (head_dim // 2)"),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str) -> None:
    case, changes = MUTANTS[name]
    for seed in range(8):
        try:
            if max(run(CASES[case], seed, changes).values()) > MOST:
                return
        except Broken:
            return
    pytest.fail("not found")
