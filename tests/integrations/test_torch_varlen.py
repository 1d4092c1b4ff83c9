"""torch's ``varlen_attn`` while it is replaced."""

from __future__ import annotations

import types

import pytest
import torch

import anyattn
from anyattn.integrations import torch_flex, torchs_function
from anyattn.testing import budget
from tests.support import plain_flash

varlen = pytest.importorskip("torch.nn.attention.varlen")  # from torch 2.10 on
compiled_before = torch.compile(varlen.varlen_attn, backend="aot_eager", fullgraph=True)
HAS_PAGES = "block_table" in varlen.varlen_attn.__kwdefaults__
needs_pages = pytest.mark.skipif(not HAS_PAGES, reason="torch 2.11 has no such arguments")
torch.manual_seed(0)
Q, K, V = torch.randn(3, 70, 4, 16)
ENDS, ENDS_K = torch.tensor([0, 30, 70], dtype=torch.int32), torch.tensor([0, 25, 70], dtype=torch.int32)
PLACES = (ENDS, ENDS_K, 40, 45)


@pytest.fixture
def replacing():
    before = anyattn.replaced()
    with anyattn.replace_flex_attention():
        yield lambda: anyattn.replaced().taken - before.taken
    assert varlen.varlen_attn.__code__ is torchs_function.torchs_function("varlen_attn").code


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (5, 3), (-2, 4)])
def test_windows_scale_and_lse(window, replacing):
    out, lse = varlen.varlen_attn(
        Q, K, V, *PLACES, return_aux=varlen.AuxRequest(lse=True), scale=0.3, window_size=window
    )  # fmt: skip
    sides = tuple(side if side >= 0 else -1 for side in window)
    wanted = anyattn.flash_attn_varlen_func(Q, K, V, *PLACES, softmax_scale=0.3, window_size=sides, return_lse=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]) and lse.shape == (4, 70) and replacing() == 1
    options = {"softmax_scale": 0.3, "window_size": window}
    defined = plain_flash.flash_attn_varlen_func(*(t.double() for t in (Q, K, V)), *PLACES, **options)
    budget.check("out", *(t.flatten()[None] for t in (out, defined, plain_flash.flash_attn_varlen_func(Q, K, V, *PLACES, **options))))
    assert torch.equal(varlen.varlen_attn(Q, K, V, *PLACES, scale=0.3, window_size=list(window)), out)


def test_gradients(replacing):
    found = []
    for call in (varlen.varlen_attn, anyattn.flash_attn_varlen_func):
        leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
        found.append(torch.autograd.grad(call(*leaves, *PLACES, window_size=(-1, 0)).square().sum(), leaves))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_compiled_before(replacing):
    torch._dynamo.reset()
    wanted = anyattn.flash_attn_varlen_func(Q, K, V, *PLACES, window_size=(-1, 0))
    assert torch.equal(compiled_before(Q, K, V, *PLACES, window_size=(-1, 0)), wanted) and replacing() == 1


@needs_pages
def test_pages_and_rows_in_use(replacing):
    pool, table = torch.randn(2, 7, 16, 4, 16), torch.tensor([[6, 1, 0], [2, 5, 4]], dtype=torch.int32)
    used = torch.tensor([25, 41], dtype=torch.int32)
    wanted = anyattn.flash_attn_varlen_func(Q, *pool, ENDS, seqused_k=used, page_table=table, num_splits=0)
    for cu_seq_k in (None, ENDS_K):
        assert torch.equal(varlen.varlen_attn(Q, *pool, ENDS, cu_seq_k, 40, 48, seqused_k=used, block_table=table), wanted)
    wanted = anyattn.flash_attn_varlen_func(Q, K, V, ENDS, ENDS_K, seqused_k=used)
    assert torch.equal(varlen.varlen_attn(Q, K, V, *PLACES, seqused_k=used, num_splits=1), wanted)


@needs_pages
def test_heads(replacing):
    k, v = K[:, :2], V[:, :2]
    wanted = anyattn.flash_attn_varlen_func(Q, k, v, *PLACES)
    assert torch.equal(varlen.varlen_attn(Q, k, v, *PLACES, enable_gqa=True), wanted)
    with pytest.raises(ValueError, match="enable_gqa=True") as raised:  # torch's own error
        varlen.varlen_attn(Q, k, v, *PLACES)
    assert "anyattn refused the call before: ValueError: query has 4 heads but key has 2" in str(raised.value.__cause__)


def test_the_signature_of_torch_2_11(monkeypatch):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        return "torch's"

    old = types.FunctionType(varlen_attn.__code__, vars(varlen), "varlen_attn")
    old.__kwdefaults__ = varlen_attn.__kwdefaults__
    monkeypatch.setattr(torchs_function, "_found", dict(torchs_function._found))
    torchs_function._found.pop("varlen_attn", None)
    monkeypatch.setattr(varlen, "varlen_attn", old)
    k, v = K[:, :2], V[:, :2]
    with anyattn.replace_flex_attention():
        got = old(Q, k, v, *PLACES, window_size=(-1, 0))
    assert torch.equal(got, anyattn.flash_attn_varlen_func(Q, k, v, *PLACES, causal=True)) and old(Q, k, v, *PLACES) == "torch's"


def test_another_signature_warns_and_flex_attention_is_replaced(monkeypatch):
    other = types.FunctionType((lambda query, block: None).__code__, vars(varlen), "varlen_attn")
    monkeypatch.setattr(torchs_function, "_found", dict(torchs_function._found))
    torchs_function._found.pop("varlen_attn", None)
    monkeypatch.setattr(varlen, "varlen_attn", other)
    flex = torchs_function.torchs_function()
    with (
        pytest.warns(UserWarning, match=r"varlen_attn is not replaced .* takes \(query, block\); wanted"),
        torch_flex.replace_flex_attention(),
    ):
        assert flex.function.__code__ is not flex.code
    assert flex.function.__code__ is flex.code and other.__code__.co_varnames == ("query", "block")
