"""A subclass is never taken for its base, and a thing is not what its name or its attributes say."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest
import torch

import anyattn
from anyattn.mods.algebra import Mask, Score
from anyattn.mods.tracing.trace import trace

S = 8
CAUSAL = torch.ones(S, S).tril().bool()
TABLE = torch.arange(S)
offset = 1


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


class Negated(functools.partial):
    def __call__(self, *args: Any) -> Any:
        return ~super().__call__(*args)


class NegatedMask(Mask):
    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return ~super().__call__(b, h, q, k)


class Doubled(Score):
    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 2 * super().__call__(s, b, h, q, k)


class WithOthers:
    """Has the attributes of a partial and of a wrapped mod."""

    def __init__(self) -> None:
        self.fn = self.func = lambda b, h, q, k, aux: q < k
        self.args, self.keywords, self.name = (), {}, "others"

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k


class Slots:
    __slots__ = ("__dict__", "window")

    def __init__(self) -> None:
        self.window, self.extra = 2, S

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < self.window + self.extra)


class Registered:
    extras: dict = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.window = 2
        self.extras[id(self)] = S

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < self.window + self.extras.get(id(self), 0))


class Shifted(torch.Tensor):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) + 1


class Text(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class Two(int):
    def __int__(self) -> int:
        return 77


@functools.wraps(torch.nn.functional.relu)
def relu(x: Any) -> Any:
    return x + offset


def at(table: torch.Tensor) -> Any:
    return lambda b, h, q, k: table[q] >= k


def with_constant(item: Any) -> Any:
    return lambda b, h, q, k: q >= k if item == "a" else q < k


fake = ModuleType("math")
fake.floor = lambda x: x + 2  # type: ignore[attr-defined]
MASKS = {
    "partial": (Negated(causal), ~CAUSAL),
    "mask": (NegatedMask(causal), ~CAUSAL),
    "inverted": (~NegatedMask(causal), CAUSAL),
    "joined": (NegatedMask(causal) & (lambda b, h, q, k: k < 9), ~CAUSAL),
    "wrapped again": (Mask(NegatedMask(causal)), ~CAUSAL),
    "attributes of others": (WithOthers(), CAUSAL),
    "slots": (Slots(), CAUSAL),
    "registered by identity": (Registered(), CAUSAL),
    "tensor": (at(TABLE.as_subclass(Shifted)), torch.ones(S, S).tril(1).bool()),  # type: ignore[arg-type]
    "parameter": (at(torch.nn.Parameter(TABLE.float())), CAUSAL),
    "text": (with_constant(Text("x")), CAUSAL),
    "int": (lambda b, h, q, k, n=Two(2): q + n >= k + 2, CAUSAL),  # noqa: B008
    "module of a library's name": (lambda b, h, q, k: fake.floor(q) >= k + 2, CAUSAL),
    "function of a library's name": (lambda b, h, q, k: relu(q) >= k + offset, CAUSAL),
}


def seen(mask: Any, aux: Any = None) -> torch.Tensor:
    q = torch.zeros(1, 1, S, 16)
    return anyattn.flex_attention(q, q, torch.eye(S)[None, None], mask_mod=mask, aux_tensors=aux)[0, 0] > 0


@pytest.mark.parametrize("name", MASKS)
def test_a_subclass_is_not_its_base(name: str) -> None:
    mask, wanted = MASKS[name]
    assert torch.equal(seen(at(TABLE)), CAUSAL) and torch.equal(seen(with_constant("a")), CAUSAL)  # memos of the base
    for _ in range(2):
        assert torch.equal(seen(mask), wanted)


@pytest.mark.parametrize("name", ["partial", "mask", "attributes of others"])
def test_compiled_calls_agree(name: str) -> None:
    mask, wanted = MASKS[name]
    aux = [torch.zeros(1)] if name == "attributes of others" else None
    torch.compiler.reset()
    assert torch.equal(torch.compile(lambda: seen(mask, aux), backend="eager")(), wanted)


def test_a_score_of_a_subclass_keeps_its_call() -> None:
    plus = lambda s, b, h, q, k: s + 1
    texts = {str(trace(mod, "score").expr) for mod in (Doubled(plus).then(plus), lambda s, b, h, q, k: 2 * (s + 1) + 1)}
    assert len(texts) == 1
    assert len({str(trace(mod, "score").expr) for mod in (Score(plus).then(Doubled(plus)), lambda s, b, h, q, k: 2 * (s + 1 + 1))}) == 1


def test_a_global_of_a_function_with_a_librarys_name_is_read_again() -> None:
    global offset
    mod = lambda b, h, q, k: relu(q) >= k
    try:
        for offset in (0, 1, 2):
            assert torch.equal(seen(mod), torch.ones(S, S).tril(offset).bool())
    finally:
        offset = 1


def test_a_tensor_that_changes_torchs_functions_is_refused() -> None:
    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    with pytest.raises(anyattn.ModError, match="__torch_function__"):
        seen(at(TABLE.as_subclass(Other)))  # type: ignore[arg-type]


# ---- functions of torch.jit


class Causal(torch.nn.Module):
    def forward(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q >= k


def plain(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


def scripted(how: str) -> Any:
    example = tuple(torch.zeros(4, dtype=torch.int64))
    if how == "script":
        return torch.jit.script(plain)
    made = torch.jit.trace(plain if how in ("trace", "partial") else Causal(), example)
    return {"partial": functools.partial(made), "method": getattr(made, "forward", None)}.get(how, made)


ENTRY_POINTS = {
    "flex": lambda x, f: anyattn.flex_attention(x, x, x, mask_mod=f),
    "block mask": lambda x, f: anyattn.create_block_mask(f, None, None, S, S, device="cpu"),
    "flash": lambda x, f: anyattn.flash_attn_func(x, x, x, mask_mod=f),
    "varlen": lambda x, f: anyattn.flash_attn_varlen_func(
        x[0], x[0], x[0], cu_seqlens_q=torch.tensor([0, 1]), cu_seqlens_k=torch.tensor([0, 1]), mask_mod=f
    ),
    "cache": lambda x, f: anyattn.flash_attn_with_kvcache(x, x, x, mask_mod=f),
    "sparsity": lambda x, f: anyattn.compute_block_sparsity(4, 4, 1, 1, S, S, f, None, "cpu"),
    "mod": lambda x, f: anyattn.mod(f),
    "join": lambda x, f: anyattn.masks.causal() & f,
    "explain": lambda x, f: anyattn.explain(x, x, x, mask_mod=f),
    "compiled": lambda x, f: torch.compile(lambda: anyattn.flex_attention(x, x, x, mask_mod=f), backend="eager")(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["trace", "script", "module", "method", "partial"])
def test_functions_of_torch_jit_are_refused_with_the_way_out(how: str) -> None:
    x, fn = torch.zeros(1, 1, S, 16), scripted(how)
    for name, call in ENTRY_POINTS.items():
        if name == "compiled" and how not in ("trace", "module"):
            continue
        torch.compiler.reset()
        with pytest.raises(anyattn.ModError, match="wanted the Python function that was traced or scripted"):
            call(x, fn)
    with pytest.raises(anyattn.ModError, match="call the Python function"):
        trace(lambda b, h, q, k: fn(b, h, q, k), "mask")
