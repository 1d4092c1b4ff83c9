"""FlashAttention's doors on random calls: lengths, forms of storage, options, mods, splits, caches, dtypes.

60 fixed calls of each door as a rule; with ANYATTN_FUZZ=n (or ``make fuzz``) n fresh ones in all, whose seeds are printed and can be given
back as ANYATTN_FUZZ_SEED.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import anyattn
from tests.entry_points import test_8_bit_append as appending
from tests.entry_points.test_flash_cache import Setting, check
from tests.entry_points.test_flash_packed import FORMS, Stored, judged, paged
from tests.support import eight_bits
from tests.support import flash_calls as calls
from tests.support import flash_reference as reference
from tests.support.fuzz.choices import Choice, choices
from tests.support.fuzz.fresh import FRESH, many
from tests.support.fuzz.random_batches import or_refused
from tests.support.fuzz.random_mods import chains, mask_of, score_of, trees
from tests.support.fuzz.shards import shards
from tests.support.sequences import Meaning, judge

SHARDS, FIXED = 2, 60

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
lengths = st.one_of(st.sampled_from((0, 1, 2, 3, 7, 31, 33, 64, 65)), st.sampled_from((0, 1, 127, 128, 129, 200)))
sides = st.one_of(st.none(), st.just(-1), st.integers(-6, 80))
heads = st.tuples(st.sampled_from((1, 2, 3, 5, 8)), st.integers(1, 2)).map(lambda x: (x[0] * x[1], x[1]))
dims = st.tuples(*(st.sampled_from((1, 4, 8, 16, 20, 33, 64, widest)) for widest in (576, 512)))


@dataclass(frozen=True)
class Options:
    """A recipe of options that prints itself."""

    mask: tuple | None
    chain: list
    causal: bool
    window: tuple
    softcap: float
    slopes: str
    has_sink: bool
    scale: float | None

    def recipe(self, query_heads: int) -> calls.Recipe:
        score, _ = score_of(self.chain, query_heads)
        mask = None if self.mask is None else mask_of(self.mask)

        def options(t: dict[str, torch.Tensor]) -> dict:
            given = {"causal": self.causal, "window_size": self.window, "softcap": self.softcap, "softmax_scale": self.scale}
            return given | {"score_mod": score, "mask_mod": mask, "sink": t.get("sink"), "alibi_slopes": t.get("alibi_slopes")}

        def shapes(h: int, b: int, n: int) -> dict[str, tuple[int, ...]]:
            slopes = {"one": {"alibi_slopes": (h,)}, "each": {"alibi_slopes": (b, h)}, "none": {}}[self.slopes]
            return slopes | ({"sink": (h,)} if self.has_sink else {})

        return calls.Recipe(options, shapes)


options = st.builds(
    Options,
    mask=st.one_of(st.none(), st.none(), trees(2)),
    chain=chains,
    causal=st.booleans(),
    window=st.one_of(st.just((-1, -1)), st.tuples(sides, sides)),
    softcap=st.sampled_from((0.0, 0.0, 1.5, 20.0)),
    slopes=st.sampled_from(("none", "none", "one", "each")),
    has_sink=st.booleans(),
    scale=st.sampled_from((None, None, 0.3)),
)


@dataclass(frozen=True)
class Sequences:
    """One random call of ``flash_attn_varlen_func``, or of ``flash_attn_func`` in the form "dense"; its repr is enough to repeat it.
    in_mode: with ``deterministic="batch"`` and what a call can have beside it: no splits, no lists."""

    form: str
    lengths: list
    heads: tuple
    dims: tuple
    dtype: torch.dtype
    kind: str
    options: Options
    splits: int
    blocks: tuple | None
    with_lse: bool
    seed: int
    in_mode: bool = False


sequences = st.builds(
    Sequences,
    form=st.sampled_from((*FORMS, "pages of 5", "packed", "dense")),
    lengths=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5),
    heads=heads,
    dims=dims,
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(("normal", "peaky", "coded")),
    options=options,
    splits=st.sampled_from((0, 1, 1, 1, 2, 3, 9)),
    blocks=st.one_of(st.none(), st.none(), st.sampled_from(((16, 16), (48, 8), (128, 64)))),
    with_lse=st.booleans(),
    seed=st.integers(0, 99),
    in_mode=st.sampled_from((False, False, True)),
)


def _splits(splits: int, in_mode: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The number of splits of a call, or the mode, which has none, where a call of this dtype can have it."""
    return {"deterministic": "batch"} if in_mode and dtype is not torch.float64 else {"num_splits": splits}


def run_sequences(call: Sequences) -> None:
    with or_refused(call.in_mode):
        _run_sequences(call)


def _run_sequences(call: Sequences) -> None:
    per_entry = call.lengths[:3] if call.form != "dense" else [call.lengths[0]] * min(2, len(call.lengths))
    n_q, n_k = ([pair[i] for pair in per_entry] for i in (0, 1))
    made = calls.ragged(n_q, n_k, call.heads, call.dims, call.dtype, call.kind, call.seed)
    recipe, more = call.options.recipe(call.heads[0]), _splits(call.splits, call.in_mode, call.dtype)
    if "deterministic" in more:
        call = replace(call, blocks=None)
    if call.form == "dense":
        tensors = recipe.draw(call.heads[0], len(n_q), made.longest, call.dtype)
        q, k, v, dout, dlse = (torch.stack(part) for part in (made.q, made.k, made.v, made.dout, made.dlse))
        given, dlse = recipe.options(tensors), dlse.transpose(1, 2) if call.with_lse else None
        if call.blocks is not None and given["mask_mod"] is not None:
            lists = anyattn.compute_block_sparsity(
                *call.blocks, len(n_q), call.heads[0], n_q[0], n_k[0], given["mask_mod"], device="cpu"
            )  # fmt: skip
            more["block_sparse_tensors"] = lists
        got = calls.call(anyattn.flash_attn_func, (q, k, v), tensors, given | more, dout, dlse, call.with_lse)
        reference.judge(reference.dense(q, k, v), got, recipe.options, tensors, dout, dlse)
        return
    stored: Stored = paged(made, 5) if call.form == "pages of 5" else FORMS[call.form](made)
    if call.blocks is not None and call.options.mask is not None and call.form.startswith("packed") and "padded" not in call.form:
        ends = {n: stored.where[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}
        more["block_sparse_tensors"] = anyattn.compute_varlen_block_sparsity(
            *call.blocks, call.heads[0], mask_of(call.options.mask), **ends
        )
    judged(made, stored, recipe, with_lse=call.with_lse, **more)


def run_chosen_sequences(call: Sequences, choice: Choice) -> None:
    """Blocks that are chosen for each sequence, in which the call's mask decides."""
    per_entry = call.lengths[:3]
    n_q, n_k = ([pair[i] for pair in per_entry] for i in (0, 1))
    made = calls.ragged(n_q, n_k, call.heads, call.dims, call.dtype, call.kind, call.seed)
    stored = FORMS[call.form if call.form in CHOSEN else "packed"](made)
    where = {n: t for n, t in stored.where.items() if n.startswith(("cu_seqlens", "seqused"))}
    inside = None if call.options.mask is None else mask_of(call.options.mask)
    lists, whole = choice.made_of_sequences(per_entry, call.heads, where, inside, "padded" if choice.causal else "flat")
    recipe = replace(call.options, mask=None).recipe(call.heads[0])
    meant = calls.Recipe(lambda t: recipe.options(t) | {"mask_mod": whole}, recipe.shapes)
    judged(made, stored, meant, with_lse=call.with_lse, mask_mod=inside, block_sparse_tensors=lists, num_splits=call.splits)


CHOSEN = ("packed", "packed int64", "tail", "partly used")


@dataclass(frozen=True)
class Cache:
    """One random call of ``flash_attn_with_kvcache``."""

    setting: Setting
    options: Options
    splits: int
    in_mode: bool = False


@st.composite
def caches(draw: Callable) -> Cache:
    batch = draw(st.integers(1, 4))
    each = lambda strategy: tuple(draw(strategy) for _ in range(batch))
    is_packed = draw(st.booleans())
    queries = each(st.integers(0, 9)) if is_packed else (draw(st.integers(0, 9)),) * batch
    new = draw(st.sampled_from((None, (), "other")))
    if new == "other":
        new = (draw(st.integers(1, 7)),) * batch
    cached = each(lengths)
    found_heads, found_dims = draw(heads), draw(dims)
    widest = found_dims[0] // 2
    setting = Setting(
        cached=cached,
        queries=queries,
        new=new,
        packed=is_packed,
        leftpad=draw(st.sampled_from((None, tuple(draw(st.integers(0, n)) for n in cached)))),
        page_size=draw(st.sampled_from((0, 1, 3, 16, 64, 128))),
        rows=draw(st.sampled_from((None, tuple(draw(st.permutations(range(batch + 3)))[:batch])))),
        rotary_dim=2 * draw(st.integers(0, widest)) if new is not None and widest else 0,
        interleaved=draw(st.booleans()),
        capacity=max(cached) + 9 + draw(st.integers(0, 70)),
        heads=found_heads,
        dims=found_dims,
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 99)),
    )
    return Cache(setting, draw(options), draw(st.sampled_from((0, 1, 2, 3, 9))), draw(st.sampled_from((False, False, True))))


def _needs_places(chain: list, mask: tuple | None) -> bool:
    """Whether a mod reads a table at q_idx, which for more queries than keys is negative here."""
    return any(step[0] in ("row_gate",) for step in chain) or (mask is not None and "documents" in str(mask))


def run_cache(call: Cache) -> None:
    s, chosen = call.setting, call.options
    firsts = [c - (s.leftpad or (0,) * len(s.cached))[b] + s.appended[b] - s.queries[b] for b, c in enumerate(s.cached)]
    if min(firsts) < 0 and _needs_places(chosen.chain, chosen.mask):
        return
    with or_refused(call.in_mode):
        check(s, chosen.recipe(s.heads[0]), **_splits(call.splits, call.in_mode, s.dtype))


@dataclass(frozen=True)
class EightBits:
    """One random call of ``flash_attn_with_kvcache`` with caches of 8 bits, and one that appends new rows, 2 * half of whose dimensions are
    rotated."""

    setting: eight_bits.Setting
    options: Options
    splits: int
    new: int = 0
    half: int = 0
    in_mode: bool = False


@st.composite
def of_8_bits(draw: Callable) -> EightBits:
    cached = tuple(draw(st.lists(lengths, min_size=1, max_size=4)))
    found_heads, found_dims = draw(heads), draw(dims)
    page_size = draw(st.sampled_from((0, 1, 3, 16, 64, 128)))
    setting = eight_bits.Setting(
        dtype=draw(st.sampled_from(eight_bits.DTYPES)),
        k_form=draw(st.sampled_from(eight_bits.FORMS)),
        v_form=draw(st.sampled_from(eight_bits.FORMS)),
        q_dtype=draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        cached=cached,
        queries=draw(st.integers(1, 9)),
        page_size=page_size,
        leftpad=draw(st.sampled_from((None, tuple(draw(st.integers(0, n)) for n in cached)))),
        shuffled_rows=not page_size and draw(st.booleans()),
        capacity=max(cached) + draw(st.integers(1, 70)),
        heads=found_heads[0],
        kv_heads=found_heads[1],
        d=found_dims[0],
        dv=found_dims[1],
        spread=draw(st.sampled_from((0.0, 4.0, 16.0))),
        seed=draw(st.integers(0, 99)),
    )
    new, half = draw(st.integers(0, min(7, setting.capacity - max(cached)))), draw(st.integers(0, found_dims[0] // 2))
    in_mode = draw(st.sampled_from((False, False, True)))
    return EightBits(setting, draw(options), draw(st.sampled_from((0, 1, 2, 3, 9))), new, half, in_mode)


def run_8_bits(call: EightBits) -> None:
    s, chosen = call.setting, call.options
    firsts = [c - p - s.queries for c, p in zip(s.cached, s.leftpad or (0,) * len(s.cached), strict=True)]
    if min(firsts) < 0 and _needs_places(chosen.chain, chosen.mask):
        return
    drawn = chosen.recipe(s.heads).draw(s.heads, len(s.cached), max(s.cached), s.q_dtype, s.seed)
    score, _ = score_of(chosen.chain, s.heads)
    meaning = Meaning(
        causal=chosen.causal, window_size=chosen.window, softcap=chosen.softcap, score_mod=score,
        mask_mod=None if chosen.mask is None else mask_of(chosen.mask), **{name: t.detach() for name, t in drawn.items()},
    )  # fmt: skip
    case = eight_bits.made(s, meaning)
    splits = _splits(call.splits, call.in_mode, s.q_dtype)
    with or_refused(call.in_mode):
        out, lse = anyattn.flash_attn_with_kvcache(*case.args, return_lse=True, **splits, **case.options)
        judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, meaning, case.firsts, label=str(s))
    if call.new:
        appending.check(s, Meaning(causal=chosen.causal, window_size=chosen.window), call.new, call.half)


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
@pytest.mark.parametrize(
    ("drawn", "run"),
    [
        (sequences, run_sequences),
        (st.tuples(sequences, choices), lambda drawn: run_chosen_sequences(*drawn)),
        (caches(), run_cache),
        (of_8_bits(), run_8_bits),
    ],
    ids=["sequences", "chosen sequences", "cache", "8 bits"],
)
def test_random_calls(drawn, run, shard):
    many(run, drawn, -(-(FRESH // 2 or FIXED) // SHARDS), shard)


def test_a_sinks_gradient_below_the_normal_numbers() -> None:
    """Found by random calls: the stored output is a multiple of float16's least number, and delta is taken of it."""
    options = Options(
        mask=None, chain=[("alibi", 0.2)], causal=False, window=(None, 20), softcap=0.0, slopes="none", has_sink=True, scale=None
    )
    run_sequences(
        Sequences(
            form="packed", lengths=[(127, 1)], heads=(2, 2), dims=(1, 16), dtype=torch.float16, kind="normal", options=options, splits=0,
            blocks=None, with_lse=False, seed=1,
        )
    )  # fmt: skip


def test_a_row_of_which_a_sink_leaves_nothing_beside_rows_of_nobody() -> None:
    """Found by random calls: its output is 0 in 16 bits, and NaN in other rows made it one that sees the sink alone."""
    options = Options(mask=None, chain=[], causal=False, window=(-1, -1), softcap=0.0, slopes="none", has_sink=True, scale=0.3)
    run_sequences(
        Sequences(
            form="tail", lengths=[(127, 1)], heads=(1, 1), dims=(20, 1), dtype=torch.float16, kind="peaky", options=options, splits=0,
            blocks=None, with_lse=True, seed=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("form", ["pages of 1", "pages of 16"])
def test_gradients_of_pages_in_the_mode(form: str) -> None:
    """Found by random calls: loops that read no pages computed them."""
    options = Options(mask=None, chain=[], causal=True, window=(-1, -1), softcap=0.0, slopes="none", has_sink=True, scale=None)
    run_sequences(
        Sequences(
            form=form, lengths=[(5, 9), (33, 65)], heads=(2, 1), dims=(16, 8), dtype=torch.float32, kind="normal", options=options,
            splits=0, blocks=None, with_lse=True, seed=0, in_mode=True,
        )
    )  # fmt: skip
