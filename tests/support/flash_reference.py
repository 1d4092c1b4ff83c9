"""Reference of FlashAttention's functions from the definition: unpacking in plain Python, the mathematics by ``anyattn.oracle``.

It uses nothing else of the library. ``dense``, ``packed`` and ``cached`` take the functions' arguments and return the sequences that they
describe; ``judge`` compares a function's results, in its own layout, with the results of these sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import Later, Noise, later

Options = Callable[[dict[str, Tensor]], dict[str, Any]]
"""From the float tensors that are drawn for a call, in any precision, to the door's keyword arguments."""


class One(NamedTuple):
    """One sequence. q (Sq, Hq, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv) are copies of rows ``q_at`` and ``k_at`` of the doors' tensors.

    first: the first query's q_idx, as mods see it. plain_q, plain_k: q and k as a careful user would have turned them in their own dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_at: tuple[Tensor, ...]
    k_at: tuple[Tensor, ...]
    first: int = 0
    plain_q: Tensor | None = None
    plain_k: Tensor | None = None


# ---- who is where


def dense(q: Tensor, k: Tensor, v: Tensor) -> list[One]:
    return packed(q, k, v)


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
) -> list[One]:
    """The sequences of ``flash_attn_varlen_func``."""
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    found = []
    for b in range(batch):
        q_at = _rows(q, b, cu_seqlens_q, seqused_q)
        if page_table is None:
            k_at = _rows(k, b, cu_seqlens_k, seqused_k)
        else:
            assert seqused_k is not None
            k_at = _paged_rows(page_table, b, k.shape[1], 0, int(seqused_k[b]))
        found.append(One(q[q_at], k[k_at], v[k_at], q_at, k_at))
    return found


def _rows(x: Tensor, b: int, ends: Tensor | None, used: Tensor | None) -> tuple[Tensor, ...]:
    start, stop = (0, x.shape[1]) if ends is None else (int(ends[b]), int(ends[b + 1]))
    if used is not None:
        stop = start + int(used[b])
    rows = torch.arange(start, stop)
    return (rows,) if ends is not None else (torch.full_like(rows, b), rows)


def _paged_rows(table: Tensor, b: int, page_size: int, start: int, stop: int) -> tuple[Tensor, ...]:
    places = [(int(table[b, t // page_size]), t % page_size) for t in range(start, stop)]
    return torch.tensor([p for p, _ in places], dtype=torch.int64), torch.tensor([r for _, r in places], dtype=torch.int64)


class Cached(NamedTuple):
    """sequences as they are after appending; appended[b]: where the new rows of sequence b must stand, and what must stand there.

    keys: the new keys turned in float64; plain_keys: turned by hand in their own dtype; values: as they were given.
    """

    sequences: list[One]
    at: list[tuple[Tensor, ...]]
    keys: list[Tensor]
    plain_keys: list[Tensor]
    values: list[Tensor]


def cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    rotary_interleaved: bool = True,
    **_: Any,
) -> Cached:
    """The sequences of ``flash_attn_with_kvcache``, from the caches as they are before the call."""
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    page_size = k_cache.shape[1]
    capacity = page_size if page_table is None else page_size * page_table.shape[1]
    follows = causal or window_size[0] not in (None, -1) or window_size[1] not in (None, -1)
    found = Cached([], [], [], [], [])
    for b in range(batch):
        old = capacity if cache_seqlens is None else int(cache_seqlens if isinstance(cache_seqlens, int) else cache_seqlens[b])
        pad = 0 if cache_leftpad is None else int(cache_leftpad[b])
        q_at = _rows(q, b, cu_seqlens_q, None)
        queries = q[q_at]
        new_k = new_v = k_cache.new_zeros(0, *k_cache.shape[2:])
        if k is not None and v is not None:
            new_at = q_at if k.ndim == 3 else (b,)
            new_k, new_v = k[new_at], v[new_at]
        else:
            new_v = v_cache.new_zeros(0, *v_cache.shape[2:])
        positions = [old + i if follows else old for i in range(len(queries))]
        turned = [turn(queries, positions, rotary_cos, rotary_sin, rotary_interleaved, w) for w in (torch.float64, None)]
        keys = [
            turn(new_k, [old + j for j in range(len(new_k))], rotary_cos, rotary_sin, rotary_interleaved, w) for w in (torch.float64, None)
        ]
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        if page_table is None:
            rows = torch.arange(pad, old + len(new_k))
            k_at: tuple[Tensor, ...] = (torch.full_like(rows, row), rows)
        else:
            k_at = _paged_rows(page_table, b, page_size, pad, old + len(new_k))
        was = tuple(t[: old - pad] for t in k_at)
        found.at.append(tuple(t[old - pad :] for t in k_at))
        found.keys.append(keys[0])
        found.plain_keys.append(keys[1].to(k_cache.dtype))
        found.values.append(new_v)
        whole = [torch.cat([k_cache[was], x.to(k_cache.dtype)]) for x in keys]
        first = len(whole[0]) - len(queries)
        exact_q, plain_q = (x.to(q.dtype) for x in turned)
        found.sequences.append(One(exact_q, whole[0], torch.cat([v_cache[was], new_v]), q_at, k_at, first, plain_q, whole[1]))
    return found


def turn(x: Tensor, positions: list[int], cos: Tensor | None, sin: Tensor | None, interleaved: bool, dtype: torch.dtype | None) -> Tensor:
    """Rotary embedding of x (rows, H, D) one pair at a time, in ``dtype``, else float32 or x's own if wider; not rounded."""
    x = x.to(dtype or torch.promote_types(x.dtype, torch.float32))
    if cos is None or sin is None:
        return x
    out, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (t[positions, i].to(x.dtype)[:, None] for t in (cos, sin))
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
    return out


# ---- what they give


def meaning(options: dict[str, Any], b: int, one: One) -> dict[str, Any]:
    """The oracle's keyword arguments for sequence b under a door's keyword arguments."""
    shift = len(one.k) - len(one.q)  # query i stands at key i + shift
    left, right = options.get("window_size", (-1, -1))
    aux = options.get("aux_tensors")
    extra = () if aux is None else (aux,)
    slopes, cap = options.get("alibi_slopes"), options.get("softcap", 0.0)
    mask_mod, score_mod = options.get("mask_mod"), options.get("score_mod")

    def mask(zero: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ahead = j - (i + shift)  # how far the key lies ahead of the query's place
        seen = ahead == ahead
        if options.get("causal"):
            seen = seen & (ahead <= 0)
        if left not in (None, -1):
            seen = seen & (ahead >= -left)
        if right not in (None, -1):
            seen = seen & (ahead <= right)
        return seen if mask_mod is None else seen & _with_aux(mask_mod, 4, (zero + b, h, i + one.first, j), extra)

    def score(s: Tensor, zero: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap:
            s = cap * torch.tanh(s / cap)
        if slopes is not None:
            s = s - (slopes[h] if slopes.ndim == 1 else slopes[b][h]) * (i + shift - j).abs()
        return s if score_mod is None else _with_aux(score_mod, 5, (s, zero + b, h, i + one.first, j), extra)

    changes = cap or slopes is not None or score_mod is not None
    return {"mask": mask, "score": score if changes else None, "sink": options.get("sink"), "scale": options.get("softmax_scale")}


def _with_aux(mod: Callable, count: int, args: tuple, aux: tuple) -> Any:
    takes = mod.__code__.co_argcount if hasattr(mod, "__code__") else count
    return mod(*args, *(aux if takes > count else ()))


def judge(
    sequences: Sequence[One],
    got: dict[str, Tensor],
    options: Options,
    tensors: dict[str, Tensor] | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    label: str = "",
) -> None:
    """Judges every result by the budget, sequence by sequence, and that rows of no sequence give 0, -inf and no gradient.

    got: ``out``, ``lse``, ``dq``, ``dk``, ``dv`` as the door lays them out; ``dsink`` and the gradients of ``tensors`` by their names.
    tensors: what ``options`` is made from, in the precision that the door got. dout, dlse: the gradients that came in, if any did.
    """
    tensors = tensors or {}
    wide = torch.promote_types(sequences[0].q.dtype if sequences else torch.float32, torch.float32)
    drawn = [{n: t.detach().to(dtype).requires_grad_() for n, t in tensors.items()} for dtype in (torch.float64, wide)]
    given = [options(t) for t in drawn]
    sums = _Sums(got)
    for b, one in enumerate(sequences):
        inputs = [_heads_first(one.q, one.k, one.v)]
        inputs.append(inputs[0] if one.plain_q is None else _heads_first(one.plain_q, one.plain_k, one.v))
        mods = [meaning(o, b, one) for o in given]
        captured = [[t for n, t in d.items() if n != "sink"] for d in drawn]
        with torch.no_grad():
            forward = [f(*x, **m) for f, x, m in zip((oracle.attention, oracle.same_dtype), inputs, mods)]
        incoming = None if dout is None else dout[one.q_at].transpose(0, 1)[None]
        incoming_lse = None if dlse is None else _rows_first(dlse)[one.q_at].transpose(0, 1)[None]
        noise = later(*inputs[0], incoming, dlse=incoming_lse, **mods[0], captured=captured[0])
        where = f"{label} sequence {b}"
        for name in ("out", "lse"):
            if name in got:
                result = _results(got, name)[one.q_at].transpose(0, 1)[None]
                budget.check(f"{where} {name}", result, *(getattr(f, name) for f in forward), noise.of(name))
        if incoming is not None:
            back = [
                f(*x, incoming, dlse=incoming_lse, **m, captured=c)
                for f, x, m, c in zip((oracle.gradients, oracle.same_dtype_gradients), inputs, mods, captured)
            ]
            sums.add(one, back, noise, [n for n in tensors if n != "sink"])
    sums.check(sequences, label)
    for name, rest in (("out", 0.0), ("lse", -torch.inf), ("dq", 0.0), ("dk", 0.0), ("dv", 0.0)):
        if name in got:
            _check_rest(f"{label} {name}", _results(got, name), [s.k_at if name in ("dk", "dv") else s.q_at for s in sequences], rest)


def _heads_first(*rows: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x.transpose(0, 1)[None] for x in rows if x is not None)


def _rows_first(lse: Tensor) -> Tensor:
    """(B, H, S) or (H, total) -> (B, S, H) or (total, H)."""
    return lse.transpose(-1, -2)


def _results(got: dict[str, Tensor], name: str) -> Tensor:
    return _rows_first(got[name]) if name == "lse" else got[name]


def _check_rest(what: str, result: Tensor, used: list[tuple[Tensor, ...]], value: float) -> None:
    rows = torch.ones(result.shape[: len(used[0]) if used else 1], dtype=torch.bool)
    for at in used:
        rows[at] = False
    rest = result[rows]
    assert bool((rest == value).all()), f"{what}: a row of no sequence is not {value}"


class _Sums:
    """Gradients as sums over the sequences: of the keys' storage, which sequences may share, and of what all of them read."""

    def __init__(self, got: dict[str, Tensor]) -> None:
        self.got = got
        self.parts: dict[str, list[Tensor]] = {}  # exact, by hand
        self.noises: dict[str, list[tuple[Callable[[], Noise], Any]]] = {}  # with the places that they are of

    def add(self, one: One, results: list[Any], noise: Later, names: list[str]) -> None:
        for name in ("dq", "dk", "dv"):
            if name in self.got:
                self._add(name, [getattr(r, name) for r in results], noise.of(name), one.q_at if name == "dq" else one.k_at)
        if "dsink" in self.got:
            self._add("dsink", [r.dsink for r in results], noise.of("dsink"), None)
        for i, name in enumerate(names):
            if name in self.got:
                self._add(name, [r.captured[i] for r in results], noise.of_captured(i), None)

    def _add(self, name: str, values: list[Tensor], noise: Callable[[], Noise], at: tuple[Tensor, ...] | None) -> None:
        wide = torch.promote_types(values[1].dtype, torch.float32)
        if name not in self.parts:
            self.parts[name] = [torch.zeros(self.got[name].shape, dtype=d) for d in (torch.float64, wide)]
            self.dtype = values[1].dtype
        for total, value in zip(self.parts[name], values):
            _add_at(total, value, at)
        self.noises.setdefault(name, []).append((noise, at))

    def _noise(self, name: str) -> Noise:
        """That of the sums: variances add up."""
        total = Noise(*(torch.zeros(self.got[name].shape, dtype=torch.float64) for _ in range(2)))
        for noise, at in self.noises[name]:
            for whole, part in zip(total, noise(), strict=True):
                _add_at(whole, part.square(), at)
        return Noise(*(t.sqrt() for t in total))

    def check(self, sequences: Sequence[One], label: str) -> None:
        for name, (exact, plain) in self.parts.items():
            is_rows = name in ("dq", "dk", "dv")
            plain = plain.to(self.dtype) if is_rows else plain
            places = [one.q_at if name == "dq" else one.k_at for one in sequences] if is_rows else [None]
            noise = functools.cache(partial(self._noise, name))
            for b, at in enumerate(places):
                got, *want = (_part(t, at) for t in (self.got[name], exact, plain))
                of_noise = partial(_noise_at, noise, at)
                budget.check(f"{label} {f'sequence {b} ' if is_rows else ''}{name}", got, *want, of_noise)


def _add_at(total: Tensor, value: Tensor, at: tuple[Tensor, ...] | None) -> None:
    if at is None:
        total += value
    else:
        total.index_put_(at, value[0].transpose(0, 1).to(total.dtype), accumulate=True)


def _part(t: Tensor, at: tuple[Tensor, ...] | None) -> Tensor:
    return t if at is None else t[at].transpose(0, 1)[None]


def _noise_at(noise: Callable[[], Noise], at: tuple[Tensor, ...] | None) -> Noise:
    return Noise(*(_part(t, at) for t in noise()))
