"""The Hopper backend's plan, the problems that it computes, and the reasons against others."""

from __future__ import annotations

import importlib.util
import math
from functools import lru_cache

import torch

from anyattn.backends.hopper.api import config_of, runs_documents
from anyattn.backends.hopper.codegen.operations import WRITTEN
from anyattn.backends.hopper.codegen.score_analysis import MOST_NUMBER, MOST_POSITIONS, work_by_pair
from anyattn.backends.hopper.config import HEAD_DIMS, LEAST_PIECE, LEAST_ROWS, WIDE
from anyattn.backends.hopper.make_config import TILES_IN_ORDER, list_tile_misfit, mods_of, tile_of
from anyattn.backends.hopper.pack_gqa import why_apart
from anyattn.backends.hopper.slower import FEW_QUERIES
from anyattn.backends.hopper.split_keys import reason_against_splits, splits_of
from anyattn.hardware import Hardware
from anyattn.mods.analysis.sharp import sharp
from anyattn.mods.float32_scores import LEAST_SCALE, is_ordinary_scale
from anyattn.mods.ir.expr import Node, category, is_weak
from anyattn.mods.tracing.cute_mod import has_native
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import BY_DOCUMENT, Backward, Plan
from anyattn.problem import Problem
from anyattn.sequences.sections import SECTION

__all__ = ["plan_of", "reason_against"]

_MOST_WORK = 64  # operations per pair: with twice as many a kernel takes 40 seconds to compile and spills registers
_TRITON = "3.6."  # whose instructions were compared (``tests/gpu/test_in_order_gpu.py``)
_UNKNOWN = frozenset((torch.uint16, torch.uint32))


def reason_against(problem: Problem) -> str | None:
    """None if the kernel can run ``problem``, else the reason against it, as text."""
    q, v = problem.q, problem.v
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    if problem.k.dtype is not q.dtype:
        return f"k and v have 8 bits, and it multiplies 16: k is {str(problem.k.dtype).removeprefix('torch.')}"
    if problem.is_batch_invariant and (reason := _against_order(problem)):
        return f'with deterministic="batch" {reason}'
    if problem.skip is not None and (problem.has_wide_heads or problem.sequences is not None):
        return (
            f"skip_below leaves tiles out at run time, which this kernel does up to head_dim {HEAD_DIMS[-1]} and without packed sequences: "
            f"head_dim is {q.shape[3]} and v's {v.shape[3]}, sequences are {'dense' if problem.sequences is None else 'packed'}"
        )
    if q.shape[3] > WIDE[-1][0] or v.shape[3] > WIDE[-1][1]:
        return f"head_dim is {q.shape[3]} and v's {v.shape[3]}; it has kernels up to {WIDE[-1][0]}, and {WIDE[-1][1]} for v"
    # flex_attention leaves the number to the plan for few queries, which may insist on this kernel; other callers ask for splits by 0
    wants_splits = problem.num_splits > 1 or (problem.num_splits == 0 and problem.bound_q > FEW_QUERIES)
    if problem.sequences is not None and problem.sequences.is_cache:
        return "split keys and caches that grow are not in this kernel yet"
    if wants_splits and (reason := reason_against_splits(problem)):
        return reason
    if max(problem.batch, problem.heads_q, problem.bound_q, problem.bound_k) >= MOST_POSITIONS:
        return "it counts positions in 24 bits, and there are 2^24 or more"
    for mod in (problem.score, *problem.predicates):
        reason = None if mod is None else _against_mod(mod)
        if reason:
            return reason
    if problem.needs_grad and has_native((problem.score, *problem.predicates)):
        return "an input requires grad, and a CuTe function has no derivative: detach the inputs, or use torch.no_grad()"
    if not problem.may_have_pairs:
        return "there is nothing to multiply"
    return _against_lists(problem) or _against_pages(problem) or _against_layout(problem)


def _against_order(problem: Problem) -> str | None:
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


def _against_mod(mod: TracedMod) -> str | None:
    missing = sorted({n.op for n in mod.expr.nodes} - WRITTEN)
    if missing:
        return f"the {mod.kind} mod uses {', '.join(missing)}, which this kernel's emitter does not write yet"
    if (work := work_by_pair(mod.expr)) > _MOST_WORK:
        return (
            f"the {mod.kind} mod takes {work} operations for every pair of a query and a key, which this kernel writes out for each "
            f"pair of a thread; it has room for {_MOST_WORK}"
        )
    if any(isinstance(x, int) and abs(x) >= MOST_NUMBER for x in mod.scalars):
        return f"the {mod.kind} mod captures a number of 2^29 or more, which the kernel's 32 bits have no room for"
    dtypes = {node.dtype for node in mod.expr.nodes if not is_weak(node.dtype)}
    found = dtypes & (_UNKNOWN | {mod.expr.nodes[at].dtype for at in sharp(mod.expr) if _differs_in_float32(mod.expr.nodes[at])})
    if found:
        return f"the {mod.kind} mod computes in {', '.join(sorted(map(str, found)))}"
    return None


def _differs_in_float32(node: Node) -> bool:
    """Whether a float of another dtype may have another value in float32, in which this kernel computes: 16-bit tensors do not."""
    if category(node.dtype) != "float" or is_weak(node.dtype) or node.dtype is torch.float32:
        return False
    if node.op == "const" and math.isfinite(node.attr):  # type: ignore[arg-type]
        wide, narrow = (float(torch.tensor(node.attr, dtype=t, device="cpu")) for t in (node.dtype, torch.float32))  # type: ignore[arg-type]
        return wide != narrow
    return node.op not in ("load", "const") or node.dtype is torch.float64


def _against_lists(problem: Problem) -> str | None:
    blocks = problem.blocks
    if blocks is None or not list_tile_misfit(tile_of(blocks)):
        return None
    rows, keys = tile_of(blocks)
    if problem.sequences is None and problem.blocks_follow:
        return None  # the lists are converted to other tiles, since the mask is evaluated in them
    return f"it reads lists of tiles of {LEAST_ROWS} rows and 16 keys, or multiples, and these block lists are in tiles of {rows} x {keys}"


def _against_pages(problem: Problem) -> str | None:
    if problem.sequences is None or problem.sequences.page_table is None or not problem.has_wide_heads:
        return None
    page = problem.k.shape[2]
    return (
        None if page % LEAST_PIECE == 0 else f"its kernel for heads above {HEAD_DIMS[-1]} reads pages of an even number of rows, not {page}"
    )


def _against_layout(problem: Problem) -> str | None:
    for name, t in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        if t.stride(3) != 1 or any(s * t.element_size() % 16 for s, n in zip(t.stride()[:3], t.shape[:3]) if n > 1) or t.data_ptr() % 16:
            return f"{name}'s strides or address are no multiples of 16 bytes, which the copy engine (TMA) wants"
        if t.shape[3] % 8:
            return f"{name} has head_dim {t.shape[3]}; the copy engine (TMA) wants a multiple of 8"
    return None


def plan_of(problem: Problem, hardware: Hardware, reason: str, options: dict[str, int], backward: Backward) -> Plan:
    """The plan; does not read the mask's row ranges, for which it would have to synchronise. options: ``validate.flex.kernel_options``.
    reason: for choosing Hopper, for people."""
    packs = bool(options["pack_gqa"]) if "pack_gqa" in options else problem.packs
    config = config_of(problem, packs)
    tiles, packed = config.tiles, config.heads_per_tile
    why = [f"hopper: {reason}", *backward.why[:1]]
    if packed == 1 and runs_documents(problem):
        why.append(BY_DOCUMENT)
    why += backward.why[1:]
    if config.in_order:
        why.append(f'sums by sections of {SECTION} keys, tiles of {tiles.tile_m} x {tiles.tile_n} in their order: deterministic="batch"')
    if packed > 1:
        why.append(f"up to {packed} of the {problem.qhead_per_kvhead} query heads that share K and V share a row tile")
    elif packs and (against := why_apart(config, problem.qhead_per_kvhead)):
        why.append(f"pack_gqa=True is not followed: {against}")
    splits = splits_of(problem, config, hardware)
    if splits > 1:
        why.append(f"keys in {splits} pieces: for {max(1, hardware.sm_count)} multiprocessors; combined by triton")
    return Plan(
        backend="hopper", tile_m=tiles.tile_m, tile_n=tiles.tile_n, backward=backward.backend, why=tuple(why), heads_per_tile=packed,
        num_splits=splits,
    )  # fmt: skip
