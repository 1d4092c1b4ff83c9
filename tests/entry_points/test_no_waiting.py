"""``flash_attn_varlen_func`` on a Hopper GPU reads nothing that tensors hold: with a GPU pretended, any such read fails."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.hopper import api, backward_launches, backward_tables, tables
from anyattn.call_cache import attention
from anyattn.hardware import Hardware
from tests.support.no_reading import Waited, no_reading, pretend_unread

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs nvidia-cutlass-dsl", allow_module_level=True)

H200 = Hardware("cuda", "an H200", 0, frozenset((torch.float16, torch.bfloat16, torch.float32)), (9, 0), 132)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """CPU tensors are taken for a Hopper GPU's; launches are noted and not made."""
    notes: list[tuple] = []
    pretend_unread(monkeypatch, H200)
    for module in (tables, api, backward_launches, backward_tables):
        monkeypatch.setattr(module, "launch", lambda config, arguments: notes.append((config, arguments)))
    attention.clear()
    yield notes
    attention.clear()


def packed(total: int, heads: int = 4) -> torch.Tensor:
    return torch.randn(total, heads, 64).bfloat16()


def ends(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


SLOPES, BIAS = torch.rand(4), torch.rand(4, 2000)
PADS = torch.tensor([0, 7, 30])


def calls() -> dict[str, dict[str, Any]]:
    q, k, cu_q, cu_k = packed(300), packed(400), ends(0, 100, 100, 290), ends(0, 90, 200, 400)
    both = {"q": q, "k": k, "v": k, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    given = both | {"max_seqlen_q": 200, "max_seqlen_k": 200}
    pages = {"k": torch.randn(9, 64, 4, 64).bfloat16(), "page_table": torch.zeros(3, 4, dtype=torch.int32), "seqused_k": ends(9, 0, 200)}
    return {
        "full": given,
        "self": {**given, "k": q, "v": q, "cu_seqlens_k": cu_q, "causal": True},
        "causal": given | {"causal": True},
        "window": given | {"window_size": (50, 10), "causal": False},
        "no greatest lengths": both | {"causal": True},
        "seqused": given | {"causal": True, "seqused_q": ends(9, 0, 100), "seqused_k": ends(1, 0, 100)},
        "int64": given | {"causal": True, "cu_seqlens_q": cu_q.long(), "cu_seqlens_k": cu_k.long()},
        "pages": {"q": q, "v": pages["k"], "cu_seqlens_q": cu_q, "causal": True, "max_seqlen_q": 200, "max_seqlen_k": 200} | pages,
        "padded queries": {"q": torch.randn(3, 50, 4, 64).bfloat16(), "k": k, "v": k, "cu_seqlens_k": cu_k, "causal": True},
        "alibi and softcap": given | {"causal": True, "softcap": 20.0, "alibi_slopes": SLOPES},
        "alibi per entry": given | {"alibi_slopes": SLOPES.expand(3, 4).contiguous()},
        "score mod": given | {"score_mod": lambda s, b, h, i, j: s + BIAS[h, i - j + 999]},
        "score mod at places of a table": given | {"causal": True, "score_mod": lambda s, b, h, i, j: s + BIAS[h, j + PADS[b]]},
        "nothing in it": given | {"cu_seqlens_q": ends(0, 0, 0, 0)},
        "lse": given | {"return_lse": True, "causal": True},
    }


@pytest.mark.parametrize("name", calls())
def test_a_call_reads_nothing(name: str, launched: list[tuple]) -> None:
    call = calls()[name]
    with torch.no_grad(), no_reading():
        anyattn.flash_attn_varlen_func(**call)
    assert len(launched) == 2


@pytest.mark.parametrize("name", ["full", "self", "causal", "window", "pages", "seqused", "score mod"])
def test_a_remembered_call_reads_nothing_and_launches_the_same(name: str, launched: list[tuple]) -> None:
    call = calls()[name]
    with torch.no_grad():
        anyattn.flash_attn_varlen_func(**call)
        known = attention.size()
        assert known == 1
        with no_reading(through_dispatch=False):
            anyattn.flash_attn_varlen_func(**call)
    assert attention.size() == known
    (config, before), (_, first), (again, after), (_, second) = launched
    assert config is again and [a for a in before if isinstance(a, int)] == [a for a in after if isinstance(a, int)]
    assert first[-2] == second[-2] and all(a is b for a, b in zip(first[-1], second[-1], strict=True))


def described(notes: list[tuple]) -> list[Any]:
    """Launches as far as they do not hang on where fresh tensors are."""

    def of(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(map(of, item))
        return (item.shape, item.stride(), item.dtype) if isinstance(item, torch.Tensor) else item

    return [(config, of(arguments)) for config, arguments in notes]


def other_lengths(name: str) -> dict[str, Any]:
    """The same call with more sequences and rows, and another greatest length."""
    call = dict(calls()[name])
    has_one_kv = call["v"] is call["k"]
    for n in ("q", "k", "v"):
        if call[n].ndim == 3:
            call[n] = packed(900)
    if has_one_kv:
        call["v"] = call["k"]
    for n, numbers in {"cu_seqlens_q": (0, 1, 1, 450, 900), "cu_seqlens_k": (0, 450, 500, 700, 900)}.items():
        if n in call:
            call[n] = ends(*numbers).to(call[n].dtype)
    if call["cu_seqlens_q"].dtype == torch.int32 and name == "self":
        call["cu_seqlens_k"], call["k"], call["v"] = call["cu_seqlens_q"], call["q"], call["q"]
    call |= {n: ends(1, 0, 100, 200) for n in ("seqused_q", "seqused_k") if n in call}
    if "page_table" in call:
        call["page_table"] = torch.zeros(4, 7, dtype=torch.int32)
    return call | {n: 450 for n in ("max_seqlen_q", "max_seqlen_k") if n in call}


def test_a_longer_call_is_checked_again(launched: list[tuple]) -> None:
    short = torch.rand(4, 450)
    mod = {"score_mod": lambda s, b, h, i, j: s + short[h, i - j + 200]}
    with torch.no_grad():
        anyattn.flash_attn_varlen_func(**calls()["full"] | mod)
        with pytest.raises(ValueError, match="reads dimension 1"):
            anyattn.flash_attn_varlen_func(**other_lengths("full") | mod)


@pytest.mark.parametrize("name", ["full", "self", "causal", "window", "seqused", "int64", "score mod", "lse", "no greatest lengths"])
def test_one_memory_serves_all_lengths(name: str, launched: list[tuple]) -> None:
    """Packed sequences are different in every step: their lengths must not make a call a new one, nor may a result depend on the memory."""
    with torch.no_grad():
        anyattn.flash_attn_varlen_func(**calls()[name])
        known = attention.size()
        launched.clear()
        anyattn.flash_attn_varlen_func(**other_lengths(name))
        assert attention.size() == known + (name == "score mod")  # whose index hangs on how far positions go
        by_memory = described(launched)
        launched.clear()
        attention.clear()
        anyattn.flash_attn_varlen_func(**other_lengths(name))
        assert described(launched) == by_memory


def test_a_window_that_begins_to_matter_is_seen(launched: list[tuple]) -> None:
    call = calls()["causal"]
    with torch.no_grad():
        anyattn.flash_attn_varlen_func(**call | {"window_size": (300, 0), "causal": False})  # as wide as the longest sequence
        anyattn.flash_attn_varlen_func(**call | {"window_size": (300, 0), "causal": False, "max_seqlen_k": 400})
    kernels = [config for config, _ in launched[1::2]]
    assert [c.has_left for c in kernels] == [False, True]


def test_with_gradients_too(launched: list[tuple]) -> None:
    call = calls()["causal"]
    with no_reading():
        anyattn.flash_attn_varlen_func(**call | {"q": call["q"].requires_grad_()})
    assert len(launched) == 2


@pytest.mark.parametrize("name", ["causal", "pages", "score mod"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_read_nothing(name: str, deterministic: bool, launched: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Hopper's kernels: one of tables, one of products, two of rows. Those of Triton's, noted and not launched: three, what pages
    want added up, and what exact sums come to."""
    from tests.support.triton import ahead

    call = calls()[name]
    wanted = [call[x].detach().clone().requires_grad_() for x in ("q", "k", "v")]
    call |= dict(zip(("q", "k", "v"), wanted, strict=True))
    if name == "score mod":
        wanted.append(bias := BIAS.clone().requires_grad_())
        call["score_mod"] = lambda s, b, h, i, j: s + bias[h, i - j + 999]
    with ahead.caught((9, 0)) as made, no_reading():
        out = anyattn.flash_attn_varlen_func(**call, deterministic=deterministic)
        made.clear()
        launched.clear()
        torch.autograd.grad(out, wanted, torch.zeros_like(out))
    if name == "causal":
        assert not made and len(launched) == 4
        return
    assert len(made) == 3 + 3 * (name == "pages") + (name == "score mod" and deterministic)


def test_validate_looks(launched: list[tuple]) -> None:
    call = calls()["causal"]
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        anyattn.flash_attn_varlen_func(**call, validate=True)  # 10 rows behind the last sequence
    with pytest.raises(Waited), no_reading():
        anyattn.flash_attn_varlen_func(**call, validate=True)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"max_seqlen_q": -1}, "max_seqlen_q=-1"),
        ({"max_seqlen_k": 1.5}, "max_seqlen_k is a float"),
        ({"cu_seqlens_k": ends(0, 400)}, "a batch of 1"),
        ({"seqused_k": ends(1, 2)}, "seqused_k has 2 entries"),
        ({"cu_seqlens_q": torch.zeros(4)}, "int32 or int64"),
    ],
)
def test_what_shapes_tell_is_still_refused(changes: dict[str, Any], message: str, launched: list[tuple]) -> None:
    call = calls()["causal"]
    with torch.no_grad():
        anyattn.flash_attn_varlen_func(**call)  # remembered
        with pytest.raises((ValueError, TypeError), match=message):
            anyattn.flash_attn_varlen_func(**call | changes)
