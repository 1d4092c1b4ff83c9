"""A backward pass that is launched again says what a first one would have said, and no pass makes another one's launches again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import anyattn
from anyattn import masks, scores
from anyattn.backends import repeater_of
from anyattn.backends.hopper import backward_launches, make_backward_config
from anyattn.backends.hopper.backward_config import BackwardConfig
from anyattn.backends.hopper.compile import launch
from anyattn.call_cache import attention
from anyattn.call_cache.attention import FlexCall
from anyattn.documents.rewrite import DocumentTables
from tests.support.hopper.pretended import Launch
from tests.support.inside import InsideMode

FLAGS, ONE, TABLE = torch.zeros(64, dtype=torch.bool), torch.tensor(2.0), torch.zeros(2, 64)
LISTS = anyattn.create_block_mask(lambda b, h, i, j: (i + j) % 3 > 0, 1, 1, 64, 64, device="cpu")


@pytest.fixture(autouse=True)
def _has_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls here are as small as one key tile, but have three launches, as longer ones do."""
    monkeypatch.setattr(make_backward_config, "_has_one_key_tile", lambda problem, tiles: False)


def qkv(length: int = 64, heads: int = 2, dtype: torch.dtype = torch.bfloat16, wanted: str = "qkv") -> list[Tensor]:
    return [torch.zeros(1, heads, length, 64, dtype=dtype).requires_grad_(name in wanted) for name in "qkv"]


def both_passes(inputs: list[Tensor], dout: Tensor | None = None, dlse: Tensor | None = None, of: str = "", **options: Any) -> list[Any]:
    """Gradients of those of q, k and v that require one, or of some. dlse: the log-sum-exp's, which is then asked for."""
    found = anyattn.flex_attention(*inputs, return_lse=dlse is not None, backend="hopper", **options)
    outs = found if dlse is not None else (found,)
    given = (torch.ones_like(outs[0]) if dout is None else dout, dlse)[: len(outs)]
    wanted = [t for t, name in zip(inputs, "qkv", strict=True) if (name in of if of else t.requires_grad)]
    return list(torch.autograd.grad(outs, wanted, given))


def planned(inputs: list[Tensor], sink: Tensor | None = None) -> Any:
    """Problem and plan of a call that asks for the log-sum-exp."""
    return attention.flex_call(FlexCall(*inputs, *(None,) * 5, False, sink, True, False, False), "hopper", None)


def told(item: Any) -> Any:
    """What an argument of a launch says, wherever its tensors are."""
    if isinstance(item, tuple):
        return tuple(map(told, item))
    return (item.dtype, item.shape, item.stride(), item.data_ptr() % 16) if isinstance(item, Tensor) else item


def of_backward(launched: list[Launch]) -> list[Any]:
    """The latest backward pass: its configs and arguments, and how many launches it has."""
    at = max(i for i, (config, _) in enumerate(launched) if isinstance(config, BackwardConfig))
    return [(config, told(arguments)) for config, arguments in launched[at - 1 : at + 2]]


def first(do: Callable[[], Any], launched: list[Launch]) -> list[Any]:
    """The backward pass as of a call that is not known."""
    attention.clear()
    launch.forget()
    launched.clear()
    do()
    found = of_backward(launched)
    attention.clear()
    return found


@contextlib.contextmanager
def nothing_described(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where a launch of the backward pass is described, or its sizes are computed."""
    with monkeypatch.context() as patch:
        for name in ("launch", "_sizes"):
            patch.setattr(backward_launches, name, None)
        yield


def table(grad: bool = False) -> Any:
    own = torch.zeros(2, 64, requires_grad=grad)
    return lambda s, b, h, i, j: s + own[h, j]


WITH: dict[str, Callable[[int], dict[str, Any]]] = {
    "nothing": lambda n: {},
    "lse": lambda n: {"dlse": torch.zeros(1, 2, 64)},
    "lse, all the same": lambda n: {"dlse": torch.zeros(1).expand(1, 2, 64)},
    "a scale": lambda n: {"scale": 0.1 + n},
    "a sink": lambda n: {"sink": torch.zeros(2)},
    "a sink that learns": lambda n: {"sink": torch.zeros(2).requires_grad_()},
    "causal": lambda n: {"mask_mod": masks.causal()},
    "a window": lambda n: {"mask_mod": masks.sliding_window(9, 0)},
    "softcap": lambda n: {"score_mod": scores.softcap(3.0 + n)},
    "a number": lambda n: {"score_mod": lambda s, b, h, i, j: s + n * (j - i)},
    "a table": lambda n: {"score_mod": table()},
    "a table that learns": lambda n: {"score_mod": table(True)},
    "a single value": lambda n: {"score_mod": lambda s, b, h, i, j: s + ONE * i},
    "bytes": lambda n: {"score_mod": lambda s, b, h, i, j: torch.where(FLAGS[j], s, s * 2)},
    "lists": lambda n: {"block_mask": LISTS},
    "deterministic": lambda n: {"mask_mod": masks.causal(), "deterministic": True},
    "deterministic lists": lambda n: {"block_mask": LISTS, "deterministic": True},
    "one head's gradients": lambda n: {"dout": torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16).expand(1, 2, 64, 64)},
    "other strides": lambda n: {"dout": torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16).transpose(1, 2)},
    "gradients of keys alone": lambda n: {"of": "k"},
}


@pytest.mark.parametrize("stores_dq", [False, True])
@pytest.mark.parametrize("name", WITH)
def test_the_second_pass_is_what_a_first_would_be(
    name: str, stores_dq: bool, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_backward_config, "_has_one_key_tile", lambda problem, tiles: stores_dq)
    for n in (1, 2):
        both_passes(qkv(), **WITH[name](n))
    inputs, options = qkv(), WITH[name](3)
    launched.clear()
    with nothing_described(monkeypatch):
        both_passes(inputs, **options)
    arguments, second = launched[2][1], of_backward(launched)
    assert second[1][0].stores_dq == stores_dq
    assert all(x.data_ptr() == t.data_ptr() for x, t in zip(arguments[:3], inputs, strict=True))
    assert second == first(lambda: both_passes(inputs, **options), launched)


def test_flash_passes_are_made_again(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv())
    for options in ({}, {"causal": True}, {"window_size": (7, 0), "softcap": 3.0}, {"alibi_slopes": torch.tensor([0.5, 0.25])}):

        def do(options: Any = options) -> Any:
            out = anyattn.flash_attn_func(q, k, v, backend="hopper", **options)
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        for _ in range(2):
            do()
        with nothing_described(monkeypatch):
            do()
        assert of_backward(launched) == first(do, launched)


def packed() -> Any:
    numbers = iter((200, 200, 150, 90))

    def do() -> Any:
        total = next(numbers)
        ends = torch.tensor([0, 5, 70, total], dtype=torch.int32)
        x = [torch.zeros(total, 2, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 130, "max_seqlen_k": 130}
        out = anyattn.flash_attn_varlen_func(*x, causal=True, backend="hopper", **given)
        return torch.autograd.grad(out, x, torch.ones_like(out))

    return do


def test_packed_sequences_of_other_lengths_have_their_own_sizes(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    from anyattn.validate import sequences

    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
    do, reference = packed(), packed()
    found = []
    for _ in range(4):
        do()
        found.append(of_backward(launched))
    for known in found:
        assert known == first(reference, launched)
    assert len({str(known) for known in found}) == 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_have_the_tiles_of_their_own_lengths(
    is_causal: bool, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of any lengths share a signature. With ``deterministic`` a call's results must not depend on the calls before it."""
    from anyattn.validate import sequences

    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)

    def do(total: int) -> list[Any]:
        ends = torch.tensor([0, total], dtype=torch.int32)
        x = [torch.zeros(total, 1, 128, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 8192, "max_seqlen_k": 8192}
        out = anyattn.flash_attn_varlen_func(*x, causal=is_causal, deterministic=True, backend="hopper", **given)
        torch.autograd.grad(out, x, torch.ones_like(out))
        return of_backward(launched)

    lengths = (70, 8192, 70, 8192)
    found = [do(total) for total in lengths]
    assert found == [first(lambda: do(total), launched) for total in lengths]  # noqa: B023
    assert [known[1][0].tiles.tile_m for known in found] == [64, 80, 64, 80]


OTHERS: dict[str, Callable[[], Any]] = {
    "a length": lambda: both_passes(qkv(192)),
    "heads": lambda: both_passes(qkv(heads=4)),
    "a dtype": lambda: both_passes(qkv(dtype=torch.float16)),
    "strides": lambda: both_passes([torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)]),
    "keys alone require a gradient": lambda: both_passes(qkv(wanted="k")),
    "keys alone are asked for theirs": lambda: both_passes(qkv(), of="k"),
    "queries and values are asked for theirs": lambda: both_passes(qkv(), of="qv"),
    "lse": lambda: both_passes(qkv(), dlse=torch.zeros(1, 2, 64)),
    "an expanded lse": lambda: both_passes(qkv(), dlse=torch.zeros(1).expand(1, 2, 64)),
    "an lse of 64 bits beside": lambda: both_passes(qkv(), dlse=torch.zeros(1, 2, 128)[..., ::2]),
    "gradients that the copy engine cannot read": lambda: both_passes(qkv(), torch.zeros(1, 2, 64, 65, dtype=torch.bfloat16)[..., :64]),
    "gradients at an odd address": lambda: both_passes(qkv(), torch.zeros(8193, dtype=torch.bfloat16)[1:].view(1, 2, 64, 64)),
    "gradients of other strides": lambda: both_passes(qkv(), torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16).transpose(1, 2)),
    "a sink that learns": lambda: both_passes(qkv(), sink=torch.zeros(2).requires_grad_()),
    "a negative scale": lambda: both_passes(qkv(), scale=-0.5),
    "deterministic": lambda: both_passes(qkv(), deterministic=True),
    "a mask": lambda: both_passes(qkv(), mask_mod=masks.causal()),
    "lists": lambda: both_passes(qkv(), block_mask=LISTS),
    "a table": lambda: both_passes(qkv(), score_mod=table()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_pass_of_other_facts_makes_launches_of_its_own(name: str, launched: list[Launch]) -> None:
    for _ in range(2):
        both_passes(qkv())
    found = []
    for _ in range(2):
        OTHERS[name]()
        found.append(of_backward(launched))
        both_passes(qkv())
    plain = of_backward(launched)
    reference = first(OTHERS[name], launched)
    assert found == [reference, reference] and plain == first(lambda: both_passes(qkv()), launched)


def test_gradients_of_some_are_those_that_were_asked_for(launched: list[Launch]) -> None:
    """Also by one plan, as a backend is told by the inputs' flags."""
    inputs = qkv()
    problem, plan = planned(inputs)
    repeater = repeater_of(problem, plan)
    with torch.no_grad():
        out, lse, _ = repeater.forward(problem)
        for wanted, launches in (("k", 2), ("qkv", 3), ("kv", 2), ("q", 3), ("", 2), ("qkv", 3)):
            given = dict(
                zip("qkv", (t.detach().requires_grad_(name in wanted) for t, name in zip(inputs, "qkv", strict=True)), strict=True)
            )
            for _ in range(2):
                launched.clear()
                found = repeater.backward(problem.like(**given), out, lse, out, None)
                dk, dv = launched[1][1][4:6]
                written = (launched[2][1][1] if launches == 3 else None, dk, dv)
                assert len(launched) == launches and found[3] is None
                assert all((g is d) if name in wanted else g is None for g, d, name in zip(found[:3], written, "qkv", strict=True))


def test_passes_of_one_plan_have_statistics_of_other_kinds(launched: list[Launch]) -> None:
    """Gradients of the log-sum-exp, or none, in any strides; a sink's gradient, or none; results as a compiled graph may bring them."""
    inputs, sink, rows = qkv(), torch.zeros(2).requires_grad_(), (1, 2, 64)
    problem, plan = planned(inputs, sink)
    repeater = repeater_of(problem, plan)
    with torch.no_grad():
        out, lse, _ = repeater.forward(problem)
        gradients = [None, torch.zeros(rows), torch.zeros(1).expand(rows), torch.zeros(rows, dtype=torch.float64)] * 2
        cases = [(lse, out, dlse, given) for dlse in gradients for given in (sink, sink.detach())]
        cases += [(torch.zeros(1, 2, 128)[..., ::2], out, None, sink), (lse, out.half(), None, sink), (lse, out, None, sink)] * 2
        for own_lse, dout, dlse, given in cases:
            launched.clear()
            found = repeater.backward(problem.like(sink=given), out, own_lse, dout, dlse)
            config, arguments = launched[0]
            assert config.has_dlse is (dlse is not None) and len(launched) == 3
            assert all(x is y for x, y in zip(arguments[:4], (out, dout, own_lse, dlse), strict=True))
            assert (arguments[4] is not None) is given.requires_grad is (found[3] is not None)


def test_gradients_are_new_for_each_pass(launched: list[Launch]) -> None:
    inputs = qkv()
    found = [both_passes(inputs) for _ in range(3)]
    assert len({g.data_ptr() for grads in found for g in grads}) == 9


def test_captured_values_are_those_of_the_call(launched: list[Launch]) -> None:
    for n in (2, 3, 5, 3):
        own = torch.full((2,), float(n))
        both_passes(qkv(), score_mod=lambda s, b, h, i, j, own=own, n=n: s + own[h] + n * (j - i), scale=0.1 * n)
        arguments = launched[2][1]
        assert arguments[-3] == (n,) and arguments[-2][0].equal(own) and arguments[18] == 0.1 * n
        assert launched[3][1][4] == 0.1 * n
        launched.clear()


def test_a_tables_gradient_is_wanted_or_not(launched: list[Launch]) -> None:
    own = torch.zeros(2, 64)
    for is_wanted in (False, True, False, True, True):
        own.requires_grad_(is_wanted)
        inputs = qkv()
        out = anyattn.flex_attention(*inputs, score_mod=lambda s, b, h, i, j: s + own[h, j], backend="hopper")
        found = torch.autograd.grad(out, [*inputs, *([own] if is_wanted else [])], torch.ones_like(out))
        config, arguments = launched[-2]
        assert len(config.sums) == len(arguments[-1]) == is_wanted and len(found) == 3 + is_wanted


def test_lists_that_were_written_to_are_read_anew(launched: list[Launch]) -> None:
    lists = torch_flex.create_block_mask(lambda b, h, i, j: (i // 128 + j // 128) % 2 == 0, 1, 1, 512, 512, device="cpu")
    for _ in range(3):
        both_passes(qkv(512), block_mask=lists)
    before = launched[-2][1][10:15]
    lists.kv_num_blocks[..., 1:] = 0
    lists.full_kv_num_blocks[..., 1:] = 0
    for _ in range(2):
        both_passes(qkv(512), block_mask=lists)
    after = launched[-2][1][10:15]
    assert not after[2].equal(before[2]) and int((after[0] + after[2]).sum()) == 2


def test_each_block_masks_own_lists(launched: list[Launch]) -> None:
    """With full tiles and without: the kernels take other kinds of arguments."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + j) % 3 > 0

    made = [anyattn.create_block_mask(mask, 1, 1, 512, 512, device="cpu") for _ in range(2)]
    partial = anyattn.BlockMask.from_kv_blocks(
        made[0].kv_num_blocks, made[0].kv_indices, BLOCK_SIZE=128, mask_mod=mask, seq_lengths=(512, 512)
    )
    order = (made[0], partial, made[1], partial, made[0])
    found = []
    for given in order:
        both_passes(qkv(512), block_mask=given)
        found.append(of_backward(launched))
    for given, known in zip(order, found, strict=True):
        assert known == first(lambda: both_passes(qkv(512), block_mask=given), launched)  # noqa: B023


@pytest.mark.parametrize("answers", [(None, True, None), (None, False, None), (True, None, True), (False, None, False, None)], ids=str)
def test_documents_are_launched_by_what_is_known(answers: tuple, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(700) // 50
    lists = anyattn.create_block_mask(masks.document(ids), 1, None, 700, 700, device="cpu")

    def do(answer: bool | None) -> list[Any]:
        monkeypatch.setattr(DocumentTables, "answer", lambda self: answer)
        launched.clear()
        both_passes(qkv(700), block_mask=lists)
        passes = [c.has_entries for c, _ in launched if isinstance(c, BackwardConfig)]
        assert passes == ([True] if answer is not False else []) + ([] if answer else [False])
        assert (launched[-1][1][3] is not None) is (answer is None)
        return of_backward(launched)

    found = [do(answer) for answer in answers]
    for answer, known in zip(answers, found, strict=True):
        assert known == first(lambda: do(answer), launched)  # noqa: B023


@pytest.mark.parametrize("which", ["all", "inputs", "results"])
def test_hooks_may_bring_saved_tensors_in_other_strides(which: str, launched: list[Launch]) -> None:
    """As ``save_on_cpu`` does, whose tensors come back contiguous."""

    turned = torch.zeros(64, 2).T
    inputs = [torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)]
    places = {t.data_ptr() for t in inputs}

    def changed(t: Tensor) -> Tensor:
        return t.contiguous() if which == "all" or (which == "inputs") is (t.data_ptr() in places) else t

    own, contiguous = (8192, 64, 128, 1), (8192, 4096, 64, 1)
    of_inputs, of_out = (own if which == "results" else contiguous), (own if which == "inputs" else contiguous)
    for options in ({}, {"score_mod": lambda s, b, h, i, j: s + turned[h, j]}):
        for _ in range(2):
            both_passes(inputs, **options)
        plain = of_backward(launched)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, changed):
            for _ in range(2):
                grads = both_passes(inputs, **options)
                assert [g.stride() for g in grads] == [of_inputs] * 3
        found = of_backward(launched)
        for (_, before), (_, products), strides in ((*plain[:2], (own, own, (1, 2))), (*found[:2], (of_inputs, of_out, (64, 1)))):
            assert (products[0][2], before[0][2]) == strides[:2]
            if options and which != "inputs":
                assert products[-2][0][2] == strides[2]
        both_passes(inputs, **options)
        assert of_backward(launched) == plain


def test_a_forgotten_kernel_is_looked_for(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        both_passes(qkv())
    made: list[Any] = []
    monkeypatch.setattr(launch, "_found_or_made", lambda config, kinds: made.append(config) or (lambda *arguments: None))
    both_passes(qkv())
    assert not made
    launch.forget()
    both_passes(qkv())
    both_passes(qkv())
    assert len(made) == 4


def test_what_was_only_compiled_is_not_launched_again(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    with launch.compiling_only(), monkeypatch.context() as patch:
        patch.setattr(launch, "warm", lambda *_: None)
        both_passes(qkv())
    assert not launched
    both_passes(qkv())
    assert len(launched) == 4


def test_a_mode_sees_what_is_allocated(launched: list[Launch]) -> None:
    seen: list[str] = []

    class Watching(InsideMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = qkv()
    for _ in range(2):
        both_passes(inputs)
    out = anyattn.flex_attention(*inputs, backend="hopper")
    with Watching():
        torch.autograd.grad(out, inputs, torch.ones_like(out.detach()))
    assert seen.count("aten.empty_strided.default") == 6


def test_threads_may_call_at_once(launched: list[Launch]) -> None:
    """Calls of two signatures, in four threads: none takes another one's sizes or tensors."""
    errors: list[Any] = []

    def work(length: int) -> None:
        try:
            for _ in range(50):
                inputs = qkv(length)
                grads = both_passes(inputs, torch.zeros(1, 2, length, 64, dtype=torch.bfloat16))
                assert [g.shape for g in grads] == [t.shape for t in inputs]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(length,)) for length in (64, 192, 64, 192)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    for config, arguments in launched:
        if isinstance(config, BackwardConfig):
            rows = arguments[0].shape[2]
            assert arguments[4].shape[2] == arguments[3].shape[2] == rows and arguments[20] == -(-rows // config.tiles.tile_n)
            assert arguments[6].shape[2] == -(-rows // config.tiles.tile_m)
