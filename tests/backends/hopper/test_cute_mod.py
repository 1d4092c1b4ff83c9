"""Mods that are CuTe functions, without a GPU: what is accepted, by what a kernel is known, every refusal, and that kernels compile."""

import dataclasses
import functools
import inspect
import json
import operator
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn import hardware, masks, planner
from anyattn.backends import repeater_of
from anyattn.backends.hopper import api, cute_api
from anyattn.backends.hopper.compile import launch
from anyattn.backends.hopper.compile.cache_key import NoContentError, key_of
from anyattn.backends.hopper.make_config import forward_spec
from anyattn.call_cache import attention
from anyattn.explanation import ModExplanation
from anyattn.hardware import Hardware
from anyattn.mods.tracing.cute_mod import NativeFunction, native_mod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.validate import flash
from anyattn.validate import flex as check
from anyattn.validate.flash import Options
from tests.support.hopper.pretended import H200
from tests.support.processes import python

cutlass, cute = pytest.importorskip("cutlass"), pytest.importorskip("cutlass.cute")

TABLE = torch.zeros(2, 64)
FACTOR = 2.0
REGISTRY = {"factor": 2.0}


@cute.jit
def biased(score, b, h, q_idx, kv_idx, aux_tensors):
    return score + aux_tensors[0][h[0], kv_idx[0]]


@cute.jit
def hidden(b, h, q_idx, kv_idx, aux_tensors):
    return operator.ge(q_idx, kv_idx)


@cute.jit
def scaled(score, b, h, q_idx, kv_idx, aux_tensors):
    return score * FACTOR


@cute.jit
def looked_up(score, b, h, q_idx, kv_idx, aux_tensors):
    return score * REGISTRY["factor"]


@cute.jit
def with_lengths(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score


@cute.jit
def whole_number(b, h, q_idx, kv_idx, aux_tensors):
    return q_idx - kv_idx


@cute.jit
def condition(score, b, h, q_idx, kv_idx, aux_tensors):
    return q_idx >= kv_idx


@cute.jit
def nothing(score, b, h, q_idx, kv_idx, aux_tensors):
    pass


@cute.jit
def two(score, b, h, q_idx, kv_idx, aux_tensors):
    return cute.full((2,), 1.0, cutlass.Float32)


def qkv(length: int = 64, heads: int = 2) -> torch.Tensor:
    return torch.randn(1, heads, length, 64, dtype=torch.bfloat16)


def flex(q: torch.Tensor, score: Any = None, mask: Any = None, block_mask: Any = None, aux: Any = None) -> Problem:
    return check.flex_problem(q, q, q, score, block_mask, mask, aux, None, False, None, False, False, False)


# ---- what it becomes


def test_all_three_doors_take_them() -> None:
    q = qkv()
    ends = torch.tensor([0, 20, 64])
    options = Options(score_mod=biased, mask_mod=hidden, aux_tensors=[TABLE])
    packed = q[0].transpose(0, 1)
    problems = [
        flex(q, biased, hidden, aux=[TABLE]),
        flash.dense_problem(*[q.transpose(1, 2)] * 3, options),
        flash.varlen_problem(*[packed] * 3, ends, ends, None, None, None, None, None, None, options),
    ]
    for problem in problems:
        for backend in (None, "hopper"):
            assert planner.choose(problem, H200, backend).backend == "hopper"
        spec = forward_spec(problem)
        # nothing is known of the mask: every tile is visited, and it is asked in each
        assert spec.config.lists is None and spec.config.partial is None
        assert spec.config.tiles.tile_m == 128  # three warp groups have no registers for it
        assert [ask.expr.output.attr.function for ask in spec.config.always] == [hidden]  # type: ignore[union-attr]
        assert spec.captured(problem) == ((), (TABLE, TABLE))


def test_lists_say_what_a_function_cannot() -> None:
    q = qkv(256)
    lists = anyattn.compute_block_sparsity(128, 128, 1, 1, 256, 256, masks.causal(), device="cpu")
    options = Options(mask_mod=hidden, block_sparse_tensors=lists, aux_tensors=[TABLE])
    config = forward_spec(flash.dense_problem(*[q.transpose(1, 2)] * 3, options)).config
    assert config.lists == "dense" and config.partial is not None and not config.partial.by_row and config.always == ()
    block_mask = anyattn.create_block_mask(masks.prefix_lm(9), 1, 1, 256, 256, device="cpu")
    config = forward_spec(flex(q, mask=hidden, block_mask=block_mask)).config
    assert config.partial is not None and config.partial.by_row and len(config.always) == 1


def test_what_anyattn_reads_keeps_its_place_beside_them() -> None:
    q = qkv().transpose(1, 2)
    options = Options(softcap=5.0, alibi_slopes=torch.ones(2), score_mod=biased, mask_mod=hidden, causal=True, aux_tensors=[TABLE])
    problem = flash.dense_problem(q, q, q, options)
    assert problem.score is not None and problem.score.tensors[-1] is TABLE
    spec = forward_spec(problem)
    assert spec.config.has_right and len(spec.config.always) == 1
    # the softcap's number and the slopes come before the function's table, whose slot has moved
    numbers, tensors = spec.captured(problem)
    assert numbers[0] == 5.0 and len(tensors) == 3 and tensors[1] is TABLE and tensors[2] is TABLE
    other = forward_spec(flex(qkv(), mask=hidden, block_mask=None)).config
    joined = forward_spec(flash.dense_problem(q, q, q, Options(mask_mod=masks.prefix_lm(3)))).config
    assert other.lists is None and joined.lists == "dense"


def test_calls_with_them_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this call's tables, and as long as the functions say the same."""
    monkeypatch.setattr(hardware, "of", lambda kind: H200)
    attention.clear()
    q, tables = qkv(), [TABLE, TABLE + 1]

    def called(score: Any, table: torch.Tensor) -> tuple[Problem, Plan]:
        return attention.flex_call(
            attention.FlexCall(q, q, q, score, None, hidden, [table], None, False, None, False, False, False), None, None
        )

    (first, made), (again, reused) = called(biased, tables[0]), called(biased, tables[1])
    assert reused is made and attention.size() == 1
    assert again.score is not None and again.score.tensors == (tables[1],) and again.predicates[0].tensors == (tables[1],)
    assert forward_spec(again).config == forward_spec(first).config
    before = called(scaled, TABLE)[0]
    monkeypatch.setitem(scaled.__wrapped__.__globals__, "FACTOR", 8.0)
    assert forward_spec(called(scaled, TABLE)[0]).config != forward_spec(before).config
    assert attention.size() == 3
    called(looked_up, TABLE)  # what it captures cannot be compared
    assert attention.size() == 3
    with pytest.raises(anyattn.BackendError, match="no derivative"):
        called(biased, TABLE.clone().requires_grad_())
    options = Options(softcap=3.0, alibi_slopes=torch.ones(2), score_mod=biased, mask_mod=hidden, aux_tensors=[TABLE])
    rows = q.transpose(1, 2)
    found = [attention.flash_call(rows, rows, rows, options._replace(aux_tensors=[t]), None)[0] for t in tables]
    assert [p.score.tensors[1] is t for p, t in zip(found, tables, strict=True)] == [True, True]  # type: ignore[union-attr]
    assert attention.size() == 4


def test_it_is_explained() -> None:
    text = str(ModExplanation(native_mod(hidden, "mask", [TABLE])))  # type: ignore[arg-type]
    assert "native" in text and "tensor 0" in text and "ranges    none" in text


# ---- what a kernel is known by


def multiplied(number: float) -> Any:
    @cute.jit
    def mod(score, b, h, q_idx, kv_idx, aux_tensors):
        return score * number

    return mod


def test_functions_of_one_content_are_one() -> None:
    one, same, other = (native_mod(multiplied(x), "score", None) for x in (2.0, 2.0, 3.0))
    assert one is not None and same is not None and other is not None
    assert one.expr == same.expr and one.expr != other.expr
    assert len({NativeFunction.of(f) for f in (biased, hidden, scaled, condition, nothing)}) == 5


def test_rebound_globals_make_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = NativeFunction.of(scaled)
    monkeypatch.setitem(scaled.__wrapped__.__globals__, "FACTOR", 4.0)
    assert NativeFunction.of(scaled) != before and before.has_content


def test_the_name_is_the_same_in_every_process() -> None:
    code = "import tests.backends.hopper.test_cute_mod as t; "
    code += "print(t.NativeFunction.of(t.biased), t.NativeFunction.of(t.multiplied(2.0)))"
    done = python("-c", code, PYTHONHASHSEED="7")
    assert done.stdout.split() == [NativeFunction.of(biased), NativeFunction.of(multiplied(2.0))], done.stderr[-2000:]


def test_a_function_that_was_compiled_keeps_its_name() -> None:
    @cute.jit
    def mod(score, b, h, q_idx, kv_idx, aux_tensors):
        return score * 3.0

    before, raw, text = NativeFunction.of(mod), mod.__wrapped__, mod.__wrapped__.__code__
    cutlass.base_dsl.dsl.BaseDSL._preprocess_and_replace_code(raw)
    assert raw.__code__ is not text and NativeFunction.of(mod) == before


def test_what_has_no_content_stays_in_memory() -> None:
    config = forward_spec(flex(qkv(), looked_up)).config
    again = forward_spec(flex(qkv(), looked_up)).config
    assert config == again and config != forward_spec(flex(qkv(), scaled)).config
    with pytest.raises(NoContentError, match="CuTe function"):
        key_of(config, ())
    assert len(key_of(forward_spec(flex(qkv(), scaled)).config, ())) == 64

    @functools.wraps(scaled)
    def wrapper(*args: Any) -> Any:
        return scaled(*args)

    assert not NativeFunction.of(wrapper).has_content  # what a decorator of the user's does is not seen


# ---- refusals


def test_signatures_and_captures() -> None:
    q = qkv()
    packs = cute.jit(lambda b, h, q_idx, kv_idx, aux_tensors: True)
    packs.__vec_size__ = 32
    captured = torch.zeros(3)

    @cute.jit
    def captures(score, b, h, q_idx, kv_idx, aux_tensors):
        return score + captured[0]

    for score, mask, error, words in (
        (hidden, None, TypeError, r"score_mod 'hidden' is a CuTe function of 5 parameters .*wanted 6: \(score, b, h, q_idx"),
        (None, biased, TypeError, r"mask_mod 'biased' is a CuTe function of 6 parameters .*wanted 5: \(b, h, q_idx"),
        (with_lengths, None, TypeError, "sequence lengths are not handed over: pass what it needs"),
        (None, packs, TypeError, "__vec_size__=32: it packs bits; wanted one Boolean"),
        (captures, None, anyattn.ModError, r"captures a tensor; pass it as aux_tensors=\[...\]"),
    ):
        with pytest.raises(error, match=words):
            flex(q, score, mask)


@pytest.mark.parametrize(
    "read",
    [
        lambda: anyattn.create_block_mask(hidden, 1, 1, 64, 64, device="cpu"),
        lambda: anyattn.compute_block_sparsity(64, 64, 1, 1, 64, 64, hidden, device="cpu"),
        lambda: anyattn.mod(hidden),
        lambda: masks.causal() & hidden,
        lambda: flex(qkv(), functools.partial(biased)),
        lambda: flex(qkv(), lambda s, b, h, i, j: biased(s, b, h, i, j, ())),
    ],
)
def test_who_must_read_a_mod_refuses(read: Any) -> None:
    with pytest.raises(anyattn.ModError, match=r"CuTe function \(@cute.jit\), which cannot be read here.*write it as plain Python"):
        read()


def test_other_backends_refuse() -> None:
    q = qkv()
    problem = flex(q, mask=hidden)
    with pytest.raises(anyattn.BackendError, match=r"only the Hopper kernel can run mask_mod 'hidden'.*pass backend='hopper'"):
        planner.choose(problem, H200, "torch")
    older = Hardware("cuda", "an A100", 0, H200.fast_dtypes, (8, 0), 108)
    with pytest.raises(anyattn.BackendError, match=r"an A100 has 8\.0; or write it as plain Python"):
        planner.choose(problem, older)
    single = flex(q.float(), biased, aux=[TABLE])
    with pytest.raises(anyattn.BackendError, match=r"score_mod 'biased'.*not float32"):
        planner.choose(single, H200)
    for backend in (None, "hopper", "torch"):
        with pytest.raises(anyattn.BackendError, match="only the Hopper kernel can run score_mod 'biased', a CuTe function"):
            anyattn.flex_attention(q, q, q, biased, aux_tensors=[TABLE], backend=backend)
        with pytest.raises(anyattn.BackendError, match="only the Hopper kernel"):
            anyattn.flash_attn_func(q, q, q, mask_mod=hidden, backend=backend)
    cache = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(anyattn.BackendError, match="only the Hopper kernel"):
        anyattn.flash_attn_with_kvcache(cache[:, :1], cache, cache, cache_seqlens=4, mask_mod=hidden)


def test_nobody_is_asked_where_there_are_no_pairs() -> None:
    q = qkv()
    assert not anyattn.flex_attention(q, q[:, :, :0], q[:, :, :0], mask_mod=hidden).any()


@cute.jit
def flagged(b, h, q_idx, kv_idx, aux_tensors):
    return (aux_tensors[0][kv_idx[0]] != 0) & (aux_tensors[1][0] > 0.5)


@cute.jit
def halved(score, b, h, q_idx, kv_idx, aux_tensors):
    return score.to(cutlass.Float16)


def test_tensors_of_any_kind_and_scores_of_any_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bool tensor is read as bytes, a single value as one of one entry."""
    monkeypatch.setenv("ANYATTN_CACHE", "0")
    aux = [torch.ones(64, dtype=torch.bool), torch.tensor(1.0)]
    problem = flex(qkv(), halved, mask=flagged, aux=aux)
    with launch.compiling_only():
        assert repeater_of(problem, planner.choose(problem, H200)).forward(problem).out.shape == problem.q.shape


@pytest.mark.parametrize("which", ["query", "table"])
def test_gradients_are_refused(which: str) -> None:
    q, table = qkv().requires_grad_(which == "query"), TABLE.clone().requires_grad_(which == "table")
    for backend in (None, "hopper"):
        with pytest.raises(anyattn.BackendError, match="has no derivative: detach the inputs"):
            planner.choose(flex(q, biased, aux=[table]), H200, backend)
    with torch.no_grad():
        assert planner.choose(flex(q, biased, aux=[table]), H200).backend == "hopper"


@pytest.mark.parametrize(
    "options,words",
    [
        ({"mask": whole_number}, "mask_mod 'whole_number' returned Int32; wanted Boolean"),
        ({"score": condition}, "score_mod 'condition' returned Boolean; wanted the score's, Float32"),
        ({"score": nothing}, "score_mod 'nothing' returned NoneType"),
        ({"score": two}, r"score_mod 'two' returned a TensorSSA of shape \(2,\); wanted that of its arguments"),
    ],
)
def test_wrong_results_are_named_while_the_kernel_is_built(options: dict, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_CACHE", "0")
    problem = flex(qkv(), **options)
    with pytest.raises(TypeError, match=words), launch.compiling_only():
        repeater_of(problem, planner.choose(problem, H200)).forward(problem)


# ---- compiling


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    """``test_families_compile.py`` compiles two."""
    done = python("-m", "tests.support.hopper.cross_compile_cute_mods", str(tmp_path), "all", CUTE_DSL_ARCH="sm_90a")
    assert done.returncode == 0, done.stderr[-3000:]
    check_frames(json.loads(done.stdout.splitlines()[-1]), 11)


def check_frames(frames: dict[str, list[int]], count: int) -> None:
    """frames: {name: bytes of local memory}."""
    assert len(frames) == count and all(frames.values()), "a kernel left no cubin to look at"
    # where a band and a sink, or a function of every score's own place, share the registers with a table, a few numbers that change once
    # a row tile lie in local memory; none is read or written in the loops over keys
    most = {"band and mask": 32, "relative": 48, "capped": 48, "ragged": 48, "ragged and capped": 48}
    spilled = {name: sizes for name, sizes in frames.items() if any(size > most.get(name, 0) for size in sizes)}
    assert not spilled, f"bytes of local memory: {spilled}"


# ---- HopperForward for users of CuTe


def described(q: torch.Tensor, k: torch.Tensor, **options: Any) -> cute_api.Described:
    return cute_api.describe(q, k, k, **options)


def test_the_arguments_are_those_of_the_front_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of ``HopperForward.__call__``, and equal to what an attention call gives the kernel."""
    q, k = torch.randn(3, 8, 700, 64, dtype=torch.bfloat16), torch.randn(3, 2, 900, 64, dtype=torch.bfloat16)
    table, launched = torch.zeros(8, 900), []
    monkeypatch.setattr(api, "launch", lambda config, given: launched.append((config, given)))
    problem = check.flex_problem(q, k, k, biased, None, masks.causal(), [table], None, True, None, True, False, False)
    result = repeater_of(problem, planner.choose(problem, H200)).forward(problem)
    found = described(q, k, score_mod=biased, mask_mod=masks.causal(), aux_tensors=[table], has_lse=True)
    ((config, wanted),) = launched
    given = cute_api.arguments(found, q, k, k, result.out, wanted[14], lse=result.lse, workers=1)
    assert found.config == config and len(given) == len(wanted)
    assert all(a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(given, wanted, strict=True))
    from anyattn.backends.hopper import HopperForward

    names = list(inspect.signature(HopperForward.__call__).parameters)
    assert names[1:5] == ["q", "k", "v", "out"] and names[8:15] == list(cute_api._TABLES) and len(names) == len(given) + 2


def test_one_compiled_kernel_takes_other_shapes(tmp_path: Path) -> None:
    from cutlass.cute.runtime import make_fake_stream

    from anyattn.backends.hopper import HopperForward

    def given(q: torch.Tensor, k: torch.Tensor, scale: float) -> tuple:
        out, counter, table = torch.empty_like(q), torch.zeros(2, dtype=torch.int32), torch.zeros(8, k.shape[2])
        return cute_api.arguments(described(q, k, score_mod=biased, aux_tensors=[table]), q, k, k, out, counter, scale=scale)

    small, wide = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16), torch.randn(3, 900, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
    one, other = given(small, small, 0.1), given(wide, wide[:, :2], 2.0)
    assert one[15:20] != other[15:20] and launch.kinds_of(one) == launch.kinds_of(other)
    kernel = HopperForward(described(small, small, score_mod=biased, aux_tensors=[TABLE]).config)
    options = f"--gpu-arch sm_90a --keep-cubin --dump-dir={tmp_path}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = cute.compile(kernel, *cute_api.placeholders(one), make_fake_stream(), options=options)
    assert compiled is not None and list(tmp_path.glob("*.cubin"))
    # CuTe's tensors do as well as torch's
    wrapped = cute_api.as_cute(other)
    again = cute_api.arguments(described(wide, wide[:, :2], score_mod=biased, aux_tensors=[TABLE]), *wrapped[:4], wrapped[14], scale=2.0)
    assert again[15:20] == other[15:20] and all(a is b for a, b in zip(cute_api.as_cute(again)[:4], wrapped[:4], strict=True))


def test_arguments_and_config_must_agree() -> None:
    q, counter = qkv(), torch.zeros(2, dtype=torch.int32)
    found = described(q, q, score_mod=biased, aux_tensors=[TABLE], has_lse=True)
    lse = torch.zeros(1, 2, 64)
    for options, error, words in (
        ({}, ValueError, "lse is missing, and the config has it"),
        ({"lse": lse, "sink": torch.zeros(2)}, ValueError, "sink is given, and the config has none"),
        ({"lse": lse, "order": torch.zeros(1, 3)}, ValueError, "order is given"),
        ({"lse": lse, "tensors": ()}, ValueError, "tensors has 0 entries; wanted 1"),
        ({"lse": lse, "page": None}, TypeError, "arguments has no page; wanted some of partial_count"),
    ):
        with pytest.raises(error, match=words):
            cute_api.arguments(found, q, q, q, q, counter, **options)
    cute_api.arguments(found.config, q, q, q, q, counter, lse=lse, tensors=(TABLE,))
    of_sequences = dataclasses.replace(found.config, has_entries=True, spread="heads")
    lengths, places = torch.zeros(5, dtype=torch.int32), torch.zeros(5, 9, dtype=torch.int32)
    rows, spread = cute_api.arguments(of_sequences, q, q, q, q, counter, lse=lse, tensors=(TABLE,), entries=lengths)[16:18]
    assert (rows, spread) == (5, 2)
    with pytest.raises(ValueError, match=r"entries has shape \(5, 9\); wanted \(B,\), numbers of keys"):
        cute_api.arguments(of_sequences, q, q, q, q, counter, lse=lse, tensors=(TABLE,), entries=places)


def test_factors_must_be_above_0() -> None:
    """Those that are applied behind the search for the maximum."""
    q, counter = qkv(), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"scale=-0\.5; wanted a number above 0"):
        cute_api.arguments(described(q, q), q, q, q, q, counter, scale=-0.5)
    capped = described(q, q, score_mod=anyattn.scores.softcap(5.0))
    cute_api.arguments(capped, q, q, q, q, counter)
    with pytest.raises(ValueError, match=r"scalars\[0\]=-5\.0, which multiplies the scores"):
        cute_api.arguments(capped, q, q, q, q, counter, scalars=(-5.0,))


def test_descriptions_say_what_they_cannot() -> None:
    q = qkv()
    with pytest.raises(ValueError, match=r"mask_mod 'prefix_lm.*' needs lists of tiles"):
        described(q, q, mask_mod=masks.prefix_lm(5))
    with pytest.raises(ValueError, match="not float32"):
        described(q.float(), q.float())
    assert described(q, q, has_sink=True).config.has_sink
