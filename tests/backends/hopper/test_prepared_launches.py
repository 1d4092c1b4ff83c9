"""A launch that is made again says what a first one would have said, and no call makes another call's launch again."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import anyattn
from anyattn import masks, scores
from anyattn.backends.hopper import api
from anyattn.backends.hopper.compile import build, launch
from anyattn.call_cache import attention
from anyattn.custom_ops import list_operands
from anyattn.custom_ops.flex import attend, operands_of
from anyattn.mods.tracing.trace import trace
from tests.support.hopper.pretended import Launch


def qkv(length: int = 64, heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.zeros(1, heads, length, 64, dtype=dtype) for _ in range(3)]


def same(one: Any, other: Any) -> bool:
    """Whether two arguments of launches say the same: tensors by memory, sizes and strides, unless they are results."""
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        return (one.dtype, one.shape, one.stride(), one.data_ptr()) == (other.dtype, other.shape, other.stride(), other.data_ptr())
    return type(one) is type(other) and one == other


RESULTS = (3, 4, 5, 6, 14)  # out, lse, highest, the sink's float32 copy and the counter are new for each call


def differ(first: Launch, second: Launch) -> list[int]:
    """Which arguments of two launches do not say the same; where new tensors stand, their kinds count."""
    assert first[0] == second[0] and len(first[1]) == len(second[1])
    places = list(enumerate(zip(first[1], second[1], strict=True)))
    kinds = [i for i, pair in places if launch.kinds_of(pair[:1]) != launch.kinds_of(pair[1:])]
    shapes = [i for i, (a, b) in places if isinstance(a, Tensor) and (a.shape, a.stride()) != (b.shape, b.stride())]
    return sorted({*kinds, *shapes, *[i for i, pair in places if i not in RESULTS and not same(*pair)]})


def first_time(do: Callable[[], Any], launched: list[Launch]) -> Launch:
    attention.clear()
    do()
    attention.clear()
    return launched[-1]


def again(do: Callable[[], Any], launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> Launch:
    """The launch of a call for which another was remembered; nothing is described or looked for."""
    with monkeypatch.context() as patch:
        for name in ("launch", "kinds_of"):
            patch.setattr(api, name, None)
        do()
    return launched[-1]


FLAGS, ONE, TABLE = torch.zeros(64, dtype=torch.bool), torch.tensor(2.0), torch.zeros(2, 64)
WITH_MODS = {
    "nothing": lambda n: {},
    "lse": lambda n: {"return_lse": True},
    "both statistics": lambda n: {"return_aux": anyattn.AuxRequest(lse=True, max_scores=True)},
    "a scale": lambda n: {"scale": 0.1 + n},
    "a sink": lambda n: {"sink": torch.zeros(2, dtype=torch.bfloat16)},
    "causal": lambda n: {"mask_mod": masks.causal()},
    "a window": lambda n: {"mask_mod": masks.sliding_window(9, 0)},
    "softcap": lambda n: {"score_mod": scores.softcap(3.0 + n)},
    "a number": lambda n: {"score_mod": lambda s, b, h, i, j: s + n * (j - i)},
    "a table": lambda n: {"score_mod": lambda s, b, h, i, j: s + TABLE[h, j]},
    "a single value": lambda n: {"score_mod": lambda s, b, h, i, j: s + ONE * i},
    "aux": lambda n: {"score_mod": lambda s, b, h, i, j, aux: s + aux[0][h, j], "aux_tensors": [TABLE]},
    "bytes": lambda n: {"score_mod": lambda s, b, h, i, j: torch.where(FLAGS[j], s, s * 2)},
}


@pytest.mark.parametrize("name", WITH_MODS)
def test_the_second_launch_is_what_a_first_would_be(name: str, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    anyattn.flex_attention(q, k, v, **WITH_MODS[name](1))
    other = qkv()
    options = WITH_MODS[name](2)
    second = again(lambda: anyattn.flex_attention(*other, **options), launched, monkeypatch)
    assert differ(first_time(lambda: anyattn.flex_attention(*other, **options), launched), second) == []
    assert all(x is y for x, y in zip(second[1][:3], other, strict=True))


def test_flash_launches_again(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv())
    slopes = torch.tensor([0.5, 0.25])
    for options in ({}, {"causal": True}, {"window_size": (7, 0), "softcap": 3.0}, {"alibi_slopes": slopes, "return_lse": True}):
        anyattn.flash_attn_func(q, k, v, **options)

        def do(options: Any = options) -> Any:
            return anyattn.flash_attn_func(q, k, v, **options)

        second = again(do, launched, monkeypatch)
        assert differ(first_time(do, launched), second) == []


def torchs_lists() -> Any:
    """A block mask of torch's, whose lists may say what its mask does not: the kernel goes by them."""
    return torch_flex.create_block_mask(lambda b, h, i, j: (i // 128 + j // 128) % 2 == 0, 1, 1, 512, 512, device="cpu")


def test_lists_are_launched_again(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    lists, shorter = torchs_lists(), torchs_lists()
    shorter.full_kv_num_blocks[..., 0] = 0

    def call(given: Any, inputs: list[Tensor]) -> Any:
        return anyattn.flex_attention(*inputs, block_mask=given, backend="hopper")

    others = {given: qkv(512) for given in (lists, shorter)}
    for given in (lists, shorter, lists, shorter):
        call(given, qkv(512))
    launches = {given: again(lambda: call(given, others[given]), launched, monkeypatch) for given in others}  # noqa: B023
    for given, second in launches.items():
        assert all(x is y for x, y in zip(second[1][:3], others[given], strict=True))
        assert differ(first_time(lambda: call(given, others[given]), launched), second) == []  # noqa: B023
    assert not torch.equal(launches[lists][1][9], launches[shorter][1][9])  # each mask's own, as tiles of the kernel


def test_lists_that_were_written_to_are_read_anew(launched: list[Launch]) -> None:
    lists = torchs_lists()
    for _ in range(3):
        anyattn.flex_attention(*qkv(512), block_mask=lists, backend="hopper")
    before = launched[-1]
    lists.kv_num_blocks[..., 1:] = 0
    lists.full_kv_num_blocks[..., 1:] = 0
    anyattn.flex_attention(*qkv(512), block_mask=lists, backend="hopper")
    reference = first_time(lambda: anyattn.flex_attention(*qkv(512), block_mask=lists, backend="hopper"), launched)
    assert differ(reference, launched[-1]) == [] and not same(before[1][11], launched[-1][1][11])  # the order of the row tiles


def test_a_dropped_block_mask_leaves_no_launch(launched: list[Launch]) -> None:
    lists = torchs_lists()
    for _ in range(2):
        anyattn.flex_attention(*qkv(512), block_mask=lists, backend="hopper")
    kept = weakref.ref(lists.kv_indices)
    del lists
    launched.clear()
    gc.collect()
    assert kept() is None


OTHERS: dict[str, Callable[[], Any]] = {
    "a length": lambda: anyattn.flex_attention(*qkv(192)),
    "heads": lambda: anyattn.flex_attention(*qkv(heads=4)),
    "a dtype": lambda: anyattn.flex_attention(*qkv(dtype=torch.float16)),
    "strides": lambda: anyattn.flex_attention(*(torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))),
    "lse": lambda: anyattn.flex_attention(*qkv(), return_lse=True),
    "a negative scale": lambda: anyattn.flex_attention(*qkv(), scale=-0.5),
    "a sink": lambda: anyattn.flex_attention(*qkv(), sink=torch.zeros(2)),
    "gradients": lambda: anyattn.flex_attention(*(x.requires_grad_() for x in qkv())),
    "a mask": lambda: anyattn.flex_attention(*qkv(), mask_mod=masks.causal()),
    "no gradients": lambda: torch.no_grad()(anyattn.flex_attention)(*qkv()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_of_other_facts_makes_a_launch_of_its_own(name: str, launched: list[Launch]) -> None:
    for _ in range(2):
        anyattn.flex_attention(*qkv())
    OTHERS[name]()
    mine = launched[-1]
    reference = first_time(OTHERS[name], launched)
    assert mine[0] == reference[0] and mine[1][15:20] == reference[1][15:20]
    assert launch.kinds_of(mine[1]) == launch.kinds_of(reference[1])


def test_a_factor_below_zero_is_another_kernel(launched: list[Launch]) -> None:
    def call(cap: float) -> Any:
        anyattn.flex_attention(*qkv(), lambda s, b, h, i, j: cap * torch.tanh(s))
        return launched[-1][0].is_factored, launched[-1][1][-2]

    assert [call(cap) for cap in (2.0, 3.0, -3.0, 4.0)] == [(True, (2.0,)), (True, (3.0,)), (False, (-3.0,)), (True, (4.0,))]


def test_a_scale_below_zero_is_another_kernel(launched: list[Launch]) -> None:
    q, k, v = qkv()
    for scale in (0.5, 0.25, -0.5, 0.125):
        anyattn.flex_attention(q, k, v, scale=scale)
    assert [config.score is None for config, _ in launched] == [True, True, False, True]
    assert [arguments[15] * math.log(2) for _, arguments in launched] == pytest.approx([0.5, 0.25, -0.5, 0.125], rel=1e-12)


def test_a_number_too_far_is_no_call_of_the_same_facts(launched: list[Launch]) -> None:
    def call(width: int) -> Any:
        anyattn.flex_attention(*qkv(), lambda s, b, h, i, j: torch.where(j < width, s, s * 2), backend="hopper")
        return launched[-1][1][-2]

    assert [call(5), call(2**29 - 1)] == [(5,), (2**29 - 1,)]
    with pytest.raises(anyattn.BackendError, match="32 bits"):
        call(2**31 - 1)


def test_a_forgotten_kernel_is_looked_for(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    anyattn.flex_attention(q, k, v)
    made = []
    monkeypatch.setattr(launch, "_found_or_made", lambda config, kinds: made.append(1) or (lambda *arguments: None))
    anyattn.flex_attention(q, k, v)
    assert (len(made), len(launched)) == (0, 2)
    launch.forget()
    anyattn.flex_attention(q, k, v)
    anyattn.flex_attention(q, k, v)
    assert (len(made), len(launched)) == (1, 2)


def test_what_was_only_compiled_is_not_launched_again(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    with launch.compiling_only(), monkeypatch.context() as patch:
        patch.setattr(launch, "warm", lambda *_: None)
        anyattn.flex_attention(q, k, v)
    assert not launched
    anyattn.flex_attention(q, k, v)
    assert len(launched) == 1


def test_lists_bring_their_tables_every_time(launched: list[Launch]) -> None:
    q, k, v = qkv(256)
    mask = anyattn.create_block_mask(lambda b, h, i, j: (i + j) % 3 > 0, 1, 1, 256, 256, device="cpu")
    for _ in range(3):
        anyattn.flex_attention(q, k, v, block_mask=mask)
    assert [isinstance(arguments[7], Tensor) for _, arguments in launched] == [True] * 3


def test_results_are_new_for_each_call(launched: list[Launch]) -> None:
    q, k, v = qkv()
    outs = [anyattn.flex_attention(q, k, v, return_lse=True) for _ in range(3)]
    assert len({t.data_ptr() for pair in outs for t in pair}) == 6
    assert launched[-1][1][15] == pytest.approx(math.log2(math.e) / 8, rel=1e-12)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_outputs_are_laid_out_as_queries(order: tuple[int, ...], launched: list[Launch]) -> None:
    """The kernel takes out's strides as they come, in the first launch and in those that follow it."""
    for batch in (1, 2):
        sizes = (batch, 2, 128, 64)
        q = torch.zeros([sizes[i] for i in order], dtype=torch.bfloat16).permute([order.index(i) for i in range(4)])
        for _ in range(3):
            out = anyattn.flex_attention(q, q, q, mask_mod=masks.causal())
            assert out.permute(order).is_contiguous() and launched[-1][1][3].stride() == out.stride()
            found = anyattn.flash_attn_func(*(q.transpose(1, 2),) * 3)
            assert found.transpose(1, 2).permute(order).is_contiguous()


def test_garbage_is_collected_again_behind_a_compilation() -> None:
    assert gc.isenabled()
    with build._without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), build._without_collections():
        _ = 1 / 0
    assert gc.isenabled()
    gc.disable()
    try:
        with build._without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def direct_call(x: list[Tensor], lists: Any, scale: float = 0.25) -> tuple:
    """A call by the function that Inductor's code calls, with a block mask."""
    listed = trace(lists.mask_mod, "mask")
    of_lists = [lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices]
    of_mods = (*operands_of(x[0], None), *operands_of(x[0], listed))
    with torch.no_grad():
        result: tuple = attend.direct(*x, None, *of_mods, of_lists, [*lists.BLOCK_SIZE], lists.is_exact, scale, False, False, "", "")
    return result


def causal_lists() -> Any:
    return anyattn.create_block_mask(masks.causal(), 1, 1, 512, 512, device="cpu")


def test_compiled_calls_read_no_lists_that_the_kernel_does_not(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of an exact mask with row ranges: the same ones, and new ones for each call."""
    lists = causal_lists()
    for _ in range(3):
        direct_call(qkv(512), lists)
    news, count = [causal_lists() for _ in range(3)], len(launched)
    with monkeypatch.context() as patch:
        for name in ("launch", "kinds_of"):
            patch.setattr(api, name, None)
        patch.setattr(list_operands, "read_lists", None)
        for given in (lists, *news):
            x = qkv(512)
            out, lse, nothing = direct_call(x, given)
            config, arguments = launched[-1]
            assert all(a is b for a, b in zip(arguments[:5], (*x, out, lse), strict=True)) and nothing.shape == (0,)
    assert len(launched) == count + 4
    assert differ(first_time(lambda: direct_call(x, causal_lists()), launched), (config, arguments)) == []


def test_compiled_calls_go_by_lists_that_were_written_to(launched: list[Launch]) -> None:
    lists = causal_lists()
    for _ in range(3):
        direct_call(qkv(512), lists)
    assert launched[-1][0].lists is None
    lists.full_kv_num_blocks[..., 1:] = 0
    for _ in range(3):
        direct_call(qkv(512), lists)
        config, arguments = launched[-1]
        assert config.lists == "dense" and not arguments[9][..., 1:].any()
    direct_call(qkv(512), causal_lists())
    assert launched[-1][0].lists is None


def test_compiled_calls_look_for_a_forgotten_kernel(launched: list[Launch]) -> None:
    lists = causal_lists()
    for _ in range(3):
        direct_call(qkv(512), lists)
    launch.forget()
    count = len(launched)
    for _ in range(2):
        direct_call(qkv(512), lists)
    assert len(launched) == count + 2
