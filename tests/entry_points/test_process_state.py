"""What torch keeps for the process changes no result: the default device and dtype, deterministic algorithms.

Nor do warm calls pass through a default device (``torch.set_default_device``, ``with torch.device(...)``). In these tests "meta" is a
device other than that of the tensors: whatever is allocated on it has no memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

import anyattn
from anyattn import masks, scores
from anyattn.call_cache import attention
from tests.support.processes import ROOT, python

B, H, N, D = 2, 4, 70, 16
Q, K, V = (torch.randn(B, h, N, D, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
TABLE, SINK = torch.linspace(-1, 1, H * (2 * N - 1)).view(H, -1), torch.linspace(0, 1, H)
IDS, PADS, ENDS = torch.arange(N) // 20, torch.tensor([40, 70]), torch.tensor([0, 30, 70], dtype=torch.int32)
SLOPES = scores.alibi_slopes(H)
CAPPED = scores.alibi(SLOPES).then(scores.softcap(5.0))
WINDOWED = masks.causal() & masks.sliding_window(9, 0) & masks.document(IDS)


def causal(b: Any, h: Any, x: Any, y: Any) -> Any:
    return x >= y


def documents(b: Any, h: Any, x: Any, y: Any) -> Any:
    return (IDS[x] == IDS[y]) & (x >= y)


def padded(b: Any, h: Any, x: Any, y: Any) -> Any:
    return (y < PADS[b]) & torch.where(x >= y, True, False)


def relative(s: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return s + TABLE[h, x - y + N - 1]


def gathered(s: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return s + TABLE[h, IDS[y]]


def flex(*mods: Any, **options: Any) -> Any:
    return anyattn.flex_attention(Q, K, V, *mods, enable_gqa=True, **options)


def rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def packed(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def varlen(*tensors: Tensor, **options: Any) -> Any:
    q, k, v = tensors or map(packed, (Q, K, V))
    return anyattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, **options)


def trained(call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    wanted = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*wanted)
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out))]


def appended() -> list[Tensor]:
    k_cache, v_cache = rows(K).contiguous(), rows(V).contiguous()
    new, lengths = rows(K)[:, :2].contiguous(), torch.tensor([5, 60], device="cpu")
    out = anyattn.flash_attn_with_kvcache(rows(Q)[:, :2], k_cache, v_cache, k=new, v=new, cache_seqlens=lengths, causal=True)
    return [out, k_cache, v_cache]


def paged() -> list[Tensor]:
    cache = anyattn.PagedKVCache(num_pages=8, page_size=16, num_heads_kv=2, head_dim=D, dtype=torch.float32, device="cpu")
    handles = [cache.add_sequence(), cache.add_sequence()]
    cache.reserve(handles, 20)
    return [cache.page_table(handles), cache.seqlens(handles)]


def lists(mask: anyattn.BlockMask) -> list[Tensor]:
    return [t for t in mask.as_tuple() if isinstance(t, Tensor)]


CALLS: dict[str, Callable[[], Any]] = {
    "plain": flex,
    "causal": lambda: flex(mask_mod=causal),
    "table of distances": lambda: flex(relative),
    "gather": lambda: flex(gathered, mask_mod=causal),
    "documents": lambda: flex(mask_mod=documents),
    "where in a mask": lambda: flex(mask_mod=padded),
    "library mods": lambda: flex(CAPPED, mask_mod=WINDOWED),
    "sink, log-sum-exp": lambda: flex(relative, mask_mod=documents, sink=SINK, return_lse=True),
    "backward": lambda: trained(lambda q, k, v: anyattn.flex_attention(q, k, v, relative, mask_mod=padded, enable_gqa=True), Q, K, V),
    "gradient of a table": lambda: trained(lambda t: flex(lambda s, b, h, x, y: s + t[h, x - y + N - 1]), TABLE),
    "deterministic": lambda: flex(relative, deterministic=True),
    "no queries": lambda: anyattn.flex_attention(Q[:, :, :0], K, V, enable_gqa=True),
    "no keys": lambda: anyattn.flex_attention(Q, K[:, :, :0], V[:, :, :0], enable_gqa=True, sink=SINK),
    "block mask": lambda: flex(block_mask=anyattn.create_block_mask(documents, None, None, N, N, BLOCK_SIZE=16)),
    "block mask on a named device": lambda: lists(anyattn.create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=16)),
    "torch's block mask": lambda: flex(block_mask=torch_flex.create_block_mask(documents, None, None, N, N, device="cpu")),
    "tile lists": lambda: list(
        vars(anyattn.compute_block_sparsity(16, 16, B, H, N, N, padded, device="cpu")).values()
    )[:4],
    "flash": lambda: anyattn.flash_attn_func(rows(Q), rows(K), rows(V), causal=True, window_size=(20, 0), softcap=3.0, alibi_slopes=SLOPES),
    "varlen": lambda: varlen(causal=True),
    "varlen, mask_mod": lambda: varlen(mask_mod=documents, score_mod=gathered),
    "varlen, backward": lambda: trained(lambda *x: varlen(*x, causal=True), *map(packed, (Q, K, V))),
    "kvcache, appending": appended,
    "kvcache, one length": lambda: anyattn.flash_attn_with_kvcache(
        rows(Q)[:, :1], rows(K).contiguous(), rows(V).contiguous(), cache_seqlens=33, causal=True, num_splits=3
    ),
    "combine": lambda: anyattn.flash_attn_combine(torch.stack([rows(Q)] * 2), torch.stack([Q[..., 0].transpose(1, 2)] * 2)),
    "pages": paged,
    "explain": lambda: [torch.tensor(len(str(anyattn.explain(Q, K, V, relative, mask_mod=documents, enable_gqa=True))), device="cpu")],
}  # fmt: skip


def tensors_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def same(a: Any, b: Any) -> bool:
    pairs = zip(tensors_of(a), tensors_of(b), strict=True)
    return all(x.device == y.device and torch.equal(x, y) for x, y in pairs)


@pytest.fixture(params=["set_default_device", "with torch.device"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    attention.clear()
    if request.param == "with torch.device":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without_a_default_device(name: str, elsewhere: None) -> None:
    first, again = CALLS[name](), CALLS[name]()
    with torch.device("cpu"):
        wanted = CALLS[name]()
    assert same(first, wanted) and same(again, wanted)
    assert torch.get_default_device().type == "meta"


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"torch's block mask", "pages", "explain"}))
def test_warm_calls_do_not_pass_through_the_default_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each torch function, method and property that passed through it would take a microsecond or more."""
    CALLS[name]()
    passed, plain = [], DeviceContext.__torch_function__

    def noted(self: Any, func: Any, *rest: Any) -> Any:
        caller = sys._getframe(1).f_code
        passed.append((caller.co_filename, func))
        return plain(self, func, *rest)

    monkeypatch.setattr(DeviceContext, "__torch_function__", noted)
    with torch.device("cpu"):
        CALLS[name]()
        torch.zeros(1)
    assert passed and not [(where, func) for where, func in passed if f"{ROOT}/anyattn/" in where]


def test_a_mod_and_hooks_of_saved_tensors_have_the_programs_default_device() -> None:
    """They are the program's code, which anyattn's host code calls."""
    found = []

    def score(s: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
        found.append(torch.get_default_device().type)
        found.append(torch.empty(3).device.type)
        return s + y

    def kept(t: Tensor) -> Tensor:
        found.append(torch.empty(3).device.type)
        return t

    q = Q.clone().requires_grad_()
    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(kept, kept):
        anyattn.flex_attention(q, K, V, score, enable_gqa=True)
    assert len(found) > 4 and set(found) == {"meta"}
    with pytest.raises((TypeError, ValueError), match="a meta tensor"), torch.device("meta"):  # as any captured tensor there
        flex(lambda s, b, h, x, y: s + torch.ones(()) * y)
    assert flex(lambda s, b, h, x, y: s + torch.ones(()) * y).device.type == "cpu"


def test_a_mod_that_changes_the_default_device_has_changed_it() -> None:
    def mask(b: Any, h: Any, x: Any, y: Any) -> Any:
        torch.set_default_device(None)
        return x >= y

    torch.set_default_device("meta")
    try:
        flex(mask_mod=mask)
        assert torch.get_default_device().type == "cpu" and torch.empty(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_other_modes_see_the_calls_and_keep_the_default_device() -> None:
    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    wanted = flex(relative, mask_mod=causal)
    with torch.device("meta"), Noted():
        assert same(flex(relative, mask_mod=causal), wanted) and torch.empty(1).is_meta
    assert len(seen) > 3


def test_every_thread_has_its_own_default_device() -> None:
    wanted, found = flex(relative, mask_mod=causal), []

    def elsewhere() -> None:
        found.append(torch.empty(1).device.type)
        with torch.device("meta"):
            found.append(same(flex(relative, mask_mod=causal), wanted) and torch.empty(1).is_meta)

    torch.set_default_device("meta")
    try:
        other = threading.Thread(target=elsewhere)
        other.start()
        for _ in range(5):
            assert same(flex(relative, mask_mod=causal), wanted)
        other.join()
    finally:
        torch.set_default_device(None)
    assert found == ["cpu", True]


def test_the_default_device_is_back_after_an_error() -> None:
    with torch.device("meta"):
        with pytest.raises(ValueError, match="query"):
            anyattn.flex_attention(Q, K[..., :8], V)
        assert torch.empty(1).is_meta


@pytest.fixture(params=["default dtype", "deterministic algorithms"])
def state(request: pytest.FixtureRequest) -> Iterator[None]:
    attention.clear()
    if request.param == "default dtype":
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without_the_state(name: str, state: None) -> None:
    first, again = CALLS[name](), CALLS[name]()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    wanted = CALLS[name]()
    assert same(first, wanted) and same(again, wanted)
    assert all(a.dtype is b.dtype for a, b in zip(tensors_of(first), tensors_of(wanted), strict=True))


class Rebuilt(torch.nn.Module):
    """A layer that makes its mask anew in each forward pass, of the documents in it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(D, 3 * D)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = anyattn.create_block_mask(lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j), len(x), None, N, N, BLOCK_SIZE=16)
        q, k, v = (t[:, None] for t in self.project(x).chunk(3, -1))
        return x + anyattn.flex_attention(q, k, v, block_mask=mask)[:, 0]


def test_a_compiled_module_whose_mask_is_rebuilt() -> None:
    """One graph serves all masks. Their lists are where what they capture is, not on the default device."""
    layer, ids = Rebuilt(), [torch.arange(N).expand(B, N) // n for n in (20, 9, 33)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = [layer(Q[:, 0], i) for i in ids]
    with torch.device("meta"):
        found = [compiled(Q[:, 0], ids[0])]
        with torch._dynamo.config.patch(error_on_recompile=True):
            found += [compiled(Q[:, 0], i) for i in ids[1:]]
    assert same(found, wanted)


@pytest.mark.slow
def test_a_compiled_module_in_changing_states() -> None:
    layer, ids = Rebuilt(), torch.arange(N).expand(B, N) // 20
    compiled, wanted = torch.compile(layer, fullgraph=True, backend="aot_eager"), layer(Q[:, 0], ids)
    try:
        for device in (None, "meta", "cpu", "meta", None):
            torch.set_default_device(device)
            torch.use_deterministic_algorithms(device == "meta")
            torch.set_default_dtype(torch.float64 if device == "cpu" else torch.float32)
            assert same(compiled(Q[:, 0], ids), wanted) and same(layer(Q[:, 0], ids), wanted)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_slopes_are_where_torch_allocates_or_on_the_named_device() -> None:
    with torch.device("meta"):
        assert scores.alibi_slopes(4).is_meta and scores.alibi_slopes(4, "cpu").tolist() == SLOPES.tolist()


@pytest.mark.slow
def test_the_entry_points_while_a_default_device_is_active() -> None:
    """Without the suspension, so that an allocation that names no device is found wherever it is."""
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/entry_points", f"--ignore={__file__}")
    done = python(*options, ANYATTN_TEST_DEFAULT_DEVICE="meta")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
