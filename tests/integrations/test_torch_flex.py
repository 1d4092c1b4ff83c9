"""``replace_flex_attention``: torch's own function, however a program holds it, runs on anyattn, and is torch's own again afterwards."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import anyattn
from anyattn import oracle
from anyattn.custom_ops import dynamo
from anyattn.integrations import replaced_calls, torchs_function
from anyattn.integrations.torchs_function import torchs_function as torchs
from anyattn.testing import budget
from anyattn.testing.rounding import rounding

B, H, S, D = 2, 4, 80, 16
compiled_at_import = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
torchs_operator = torch.ops.higher_order.flex_attention


@pytest.fixture
def replacing():
    torch._dynamo.reset()
    dynamo.run_uncompiled(False)  # whatever tests before have tried to capture
    with anyattn.replace_flex_attention() as replacement:
        yield replacement
    assert not is_replaced()
    torch._dynamo.reset()


@pytest.fixture
def counts(monkeypatch):
    """Counts from 0, and every reason warns."""
    monkeypatch.setattr(replaced_calls, "_counts", replaced_calls._Counts())
    return anyattn.replaced


def is_replaced() -> bool:
    return flex_attention.__code__ is not torchs().own.__code__


def inputs(heads_kv=H, dtype=torch.float32, grad=False, length=S):
    g = torch.Generator().manual_seed(0)
    shapes = [(B, n, length, D) for n in (H, heads_kv, heads_kv)]
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_(grad) for shape in shapes]  # the same numbers in any dtype


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def lists(mask=causal, length=S, block=16):
    return create_block_mask(mask, None, None, length, length, device="cpu", BLOCK_SIZE=block)


def foreign(score, b, h, q_idx, kv_idx):
    """A mod that torch takes and anyattn refuses."""
    return score + torch.special.bessel_j0(score)


def with_gradients(call, q, k, v, *others):
    out, aux = call(q, k, v)
    weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
    return out, aux.lse, aux.max_scores, *torch.autograd.grad((out * weights).sum() + aux.lse.sum(), (q, k, v, *others))


def equal(got, wanted):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# ---- calls taken


def everything(fn, bias):
    """A call of ``fn`` with all that torch's function takes."""

    def call(q, k, v):
        return fn(
            q, k, v, lambda s, b, h, i, j: s + bias[h] * (i - j), lists_of_call, 0.3, True, kernel_options={"BLOCK_M": 64},
            return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip

    lists_of_call = lists()
    return call


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_call_gives_what_anyattns_own_gives_forward_and_backward(backend, replacing, counts):
    bias = torch.linspace(-0.1, 0.1, H).requires_grad_()
    tensors = (*inputs(heads_kv=2, grad=True), bias)
    call = everything(flex_attention, bias)
    if backend is not None:
        call = torch.compile(call, backend=backend, fullgraph=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserWarning)
        got = with_gradients(call, *tensors)
    assert equal(got, with_gradients(everything(anyattn.flex_attention, bias), *tensors))
    assert counts() == replaced_calls.ReplacedCalls(1, 0, {})
    assert not [w for w in seen if "flex_attention" in str(w.message)]


def test_outputs_and_lse_and_max_mean_what_torchs_do(replacing):
    def some_rows(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx % 7 != 3)  # every seventh row sees nothing

    def score(s, b, h, q_idx, kv_idx):
        return s * 1.5 + (h - q_idx + kv_idx) * 0.1

    block_mask = lists(some_rows)
    tensors = inputs()
    out, lse, highest = torchs_operator(*[t.double() for t in tensors], score, block_mask.as_tuple(), 1 / math.sqrt(D), {})
    exact = (out, lse * math.log(2), highest * math.log(2))  # the operator's are to base 2
    plain, noise = (f(*tensors, score=score, mask=some_rows) for f in (oracle.same_dtype, rounding))
    out, aux = flex_attention(*tensors, score, block_mask, return_aux=AuxRequest(lse=True, max_scores=True))
    budget.check("out", out, exact[0], plain.out, noise.out)
    budget.check("lse", aux.lse, exact[1], plain.lse, noise.lse)
    budget.check("max_scores", aux.max_scores, exact[2], plain.max_scores, noise.lse)
    assert torch.equal(flex_attention(*tensors, score, block_mask, return_lse=True)[1], aux.lse)


@pytest.mark.parametrize(
    "name",
    [
        *sorted(torch_flex.FlexKernelOptions.__annotations__), "fwd_BLOCK_M", "bwd_num_stages", "SPLIT_KV", "SKIP_MASK_SCORE",
        "PARTITION_SIZE", "FLOAT32_PRECISION", "num_consumer_groups", "a name of some later torch",
    ],
)  # fmt: skip
def test_torchs_kernel_options_are_ignored(name, replacing, counts):
    value = "TRITON" if name == "BACKEND" else 32
    assert torch.equal(flex_attention(*inputs(), kernel_options={name: value}), anyattn.flex_attention(*inputs()))
    assert counts().taken == 1


def test_anyattns_kernel_options_are_understood(replacing, counts):
    options = {"tile_m": 16, "tile_n": 32, "BLOCK_M": 64}
    assert torch.equal(flex_attention(*inputs(), kernel_options=options), anyattn.flex_attention(*inputs(), kernel_options=options))
    assert counts().taken == 1


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_torchs_masks_for_no_mask_are_none(backend, replacing, counts):
    def call(q, k, v):
        empty = flex_attention(q, k, v, block_mask=torch_flex._create_empty_block_mask(q, k))
        return empty, flex_attention(q, k, v, block_mask=all_listed)

    all_listed = lists(torch_flex.noop_mask, block=128)
    if backend is not None:
        call = torch.compile(call, backend=backend, fullgraph=True)
    wanted = anyattn.flex_attention(*inputs())
    assert all(torch.equal(out, wanted) for out in call(*inputs()))
    assert counts().taken == 2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_autocast_casts_as_torchs_operator_does(backend, replacing):
    call = flex_attention if backend is None else torch.compile(flex_attention, backend=backend, fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(*inputs())
    assert torch.equal(out, call(*[t.bfloat16() for t in inputs()]))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_torchs_switch_for_deterministic_algorithms_holds(backend, replacing, monkeypatch):
    seen = []
    own = anyattn.validate.flex.flex_problem
    monkeypatch.setattr(anyattn.validate.flex, "flex_problem", lambda *args: seen.append(args[12]) or own(*args))
    anyattn.call_cache.attention.clear()
    call = flex_attention if backend is None else torch.compile(flex_attention, backend=backend, fullgraph=True)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        call(*inputs(length=48))
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen and all(seen)


def test_new_tensors_and_new_closures_are_one_graph(replacing, counts):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def call(q, k, v, ids, bias):
        block_mask = create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, S, S, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h], block_mask)

    for n in (7, 9, 11):
        ids, bias = torch.arange(S) // n, torch.randn(H)
        block_mask = lists(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]))  # noqa: B023
        wanted = flex_attention(*inputs(), lambda s, b, h, i, j: s + bias[h], block_mask, return_lse=True)  # noqa: B023
        assert torch.equal(call(*inputs(), ids, bias), wanted[0])  # an operator is always asked for the log-sum-exp
    assert len(graphs) == 1 and counts().taken == 3 + 1  # counted when traced


# ---- references to torch's function


def test_every_reference_is_served_and_is_torchs_again_afterwards(counts):
    def model(q, k, v):
        return torch_flex.flex_attention(q, k, v) * 2

    held = [flex_attention, torch_flex.flex_attention, functools.partial(flex_attention, scale=None), compiled_at_import, model]
    held += [torch.compile(model, backend="aot_eager", fullgraph=True)]
    torch._dynamo.reset()
    before = [call(*inputs()) for call in held]
    assert counts().taken == 0
    for newly_taken in (6, 4):  # what was compiled the first time is known the second time
        taken = counts().taken
        with anyattn.replace_flex_attention():
            during = [call(*inputs()) for call in held]
        assert counts().taken == taken + newly_taken
        wanted = anyattn.flex_attention(*inputs())
        assert all(torch.equal(got, wanted * factor) for got, factor in zip(during, (1, 1, 1, 1, 2, 2), strict=True))
        taken = counts().taken
        assert equal([call(*inputs()) for call in held], before) and counts().taken == taken


def test_defaults_signature_and_name_are_torchs(replacing):
    assert inspect.signature(flex_attention) == inspect.signature(torchs().own)
    assert flex_attention.__code__.co_name == "flex_attention" and flex_attention.__doc__ == torchs().own.__doc__


def test_undo_ends_a_replacement_once():
    outer, inner = anyattn.replace_flex_attention(), anyattn.replace_flex_attention()
    inner.undo()
    inner.undo()
    assert is_replaced()
    with outer:
        assert is_replaced()
    assert not is_replaced()
    with pytest.raises(KeyError), anyattn.replace_flex_attention():
        raise KeyError
    assert not is_replaced()


def test_threads_replace_and_undo_at_once(counts):
    wanted, own = anyattn.flex_attention(*inputs()), flex_attention.__code__
    wrong = []

    def run():
        for _ in range(40):
            with anyattn.replace_flex_attention():
                if not torch.equal(flex_attention(*inputs()), wanted):
                    wrong.append("another result")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and counts() == replaced_calls.ReplacedCalls(160, 0, {})
    assert flex_attention.__code__ is own


def test_another_threads_compilation_ends_before_the_code_changes(counts):
    torch._dynamo.reset()
    is_compiling, may_end, order = threading.Event(), threading.Event(), []

    def backend(graph, _):
        is_compiling.set()
        may_end.wait(60)
        order.append("compiled")
        return graph.forward

    call = torch.compile(flex_attention, backend=backend, fullgraph=True)
    compiling = threading.Thread(target=lambda: order.append(call(*inputs()).shape))
    compiling.start()
    assert is_compiling.wait(60)
    threading.Timer(0.2, may_end.set).start()
    with anyattn.replace_flex_attention():
        order.append("replaced")
    compiling.join()
    assert order.index("compiled") < order.index("replaced") and (B, H, S, D) in order and counts().taken == 0


def test_a_function_that_something_else_replaced_is_left_alone(monkeypatch):
    own = torch_flex.flex_attention
    monkeypatch.setattr(torchs_function, "_found", {})
    monkeypatch.setattr(torch_flex, "flex_attention", lambda *args, **kwargs: own(*args, **kwargs))
    with pytest.raises(RuntimeError, match=r"which is not torch's function: something else has replaced it"):
        anyattn.replace_flex_attention()
    monkeypatch.undo()
    assert not is_replaced()


def test_a_torch_with_another_signature_is_left_alone(monkeypatch):
    changed = lambda query, key, value, score_mod=None, window=None: None
    monkeypatch.setattr(torchs_function, "_found", {})
    function = type(changed)(changed.__code__, vars(torch_flex), "flex_attention")
    monkeypatch.setattr(torch_flex, "flex_attention", function)
    with pytest.raises(RuntimeError, match=r"takes \(query, key, value, score_mod, window\); wanted \(query, .* return_aux\)"):
        anyattn.replace_flex_attention()
    assert function.__code__ is changed.__code__


# ---- calls passed on


def test_what_anyattn_refuses_is_torchs_with_one_warning_for_each_reason(replacing, counts):
    wanted = torchs().own(*inputs(), foreign)
    with pytest.warns(
        UserWarning, match=r"torch's own flex_attention computes a call that anyattn was to take: ModError: .*bessel"
    ) as seen:
        assert torch.equal(flex_attention(*inputs(), foreign), wanted)
    assert [w.filename for w in seen if "bessel" in str(w.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(flex_attention(*inputs(), foreign), wanted)
    with pytest.warns(UserWarning, match=r"TypeError: query has dtype torch.int64"):
        flex_attention(*[t.long() for t in inputs()])
    found = counts()
    assert (found.taken, found.passed_on) == (0, 3)
    assert list(found.reasons.values()) == [2, 1] and "bessel" in next(iter(found.reasons))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_refused_call_is_torchs_operator_in_the_same_graph(backend, replacing, counts):
    def call(q, k, v):
        return flex_attention(q, k, v, foreign) + flex_attention(q, k, v, block_mask=block_mask)

    block_mask = lists()
    wanted = torchs().own(*inputs(), foreign) + anyattn.flex_attention(*inputs(), block_mask=block_mask, return_lse=True)[0]
    with pytest.warns(UserWarning, match="bessel"):
        got = torch.compile(call, backend=backend, fullgraph=True)(*inputs())
    assert torch.equal(got, wanted)
    assert (counts().taken, counts().passed_on) == (1, 1)
    assert torch.equal(anyattn.flex_attention(*inputs()), torch.compile(anyattn.flex_attention, backend=backend, fullgraph=True)(*inputs()))


def test_reasons_that_differ_in_numbers_are_one(counts):
    with pytest.warns(UserWarning, match="length 3"):
        replaced_calls.count_passed_on("flex_attention", "ValueError: length 3\nmore")
    replaced_calls.count_passed_on("flex_attention", "ValueError: length 5\nelse")
    assert counts().reasons == {"ValueError: length 3": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(300):
            replaced_calls.count_passed_on("flex_attention", "x" * i)
    assert len(counts().reasons) <= 101 and counts().passed_on == 302


class Subclass(torch.Tensor):
    pass


def test_tensor_subclasses_and_transforms_are_torchs(replacing, counts):
    q, k, v = inputs()
    with pytest.warns(UserWarning, match="a Subclass comes as query, key or value"):
        flex_attention(q, k.as_subclass(Subclass), v)
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.warns(UserWarning, match="a FakeTensor comes as"):
        assert flex_attention(*[torch.empty(1, 2, 16, 16) for _ in range(3)]).shape == (1, 2, 16, 16)
    assert counts().passed_on == 2
    with pytest.raises(Exception) as error:  # torch's own has no rule for it either
        torch.vmap(lambda x: flex_attention(x, x, x))(q[None])
    assert "a torch.func transform" in str(error.value.__cause__) or error.value.__cause__ is not None


ERRORS = {
    "heads": lambda q, k, v: flex_attention(q, k[:, :1], v[:, :1]),
    "dimensions": lambda q, k, v: flex_attention(q[0], k[0], v[0]),
    "head_dim": lambda q, k, v: flex_attention(q, k[..., :8], v),
    "lengths": lambda q, k, v: flex_attention(q[:, :, :20], k, v, block_mask=lists()),
    "block_mask": lambda q, k, v: flex_attention(q, k, v, block_mask=causal),
    "two ways of lse": lambda q, k, v: flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True)),
    "sliced": lambda q, k, v: flex_attention(q, k, v, block_mask=lists()[:, :, :2]),
    "none": lambda q, k, v: flex_attention(None, k, v),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_both_refuse_is_torchs_own_error(name, counts):
    found = []
    for context in (contextlib.nullcontext, anyattn.replace_flex_attention):
        with context(), pytest.raises(Exception) as error:
            ERRORS[name](*inputs())
        found.append((type(error.value), str(error.value)))
    assert found[0] == found[1] and counts() == replaced_calls.ReplacedCalls(0, 0, {})


def test_an_error_of_torchs_says_what_anyattn_had_against_the_call(replacing):
    q, k, v = inputs(grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU") as error:
        flex_attention(q, k, v, foreign)
    assert "anyattn refused the call before: ModError" in str(error.value.__cause__)


def test_a_mod_that_dynamo_cannot_trace_runs_outside_the_graph(replacing, counts, tmp_path):
    (tmp_path / "number").write_text("2.5")

    def score(s, b, h, q_idx, kv_idx):
        with open(tmp_path / "number") as file:
            return s * float(file.read())

    def call(q, k, v):
        return flex_attention(q * 1, k, v, score) * 2

    with pytest.warns(UserWarning, match="torch.compile cannot capture a score_mod of anyattn"):
        got = torch.compile(call, backend="aot_eager")(*inputs())
    assert torch.equal(got, anyattn.flex_attention(*inputs(), lambda s, b, h, i, j: s * 2.5) * 2)
    assert counts().taken == 1 and counts().passed_on == 0


def test_counting_is_marked_for_dynamo_as_torch_marks_it(replacing):
    from anyattn.integrations import torch_flex_call

    def marked():
        pass

    torch.compiler.assume_constant_result(marked)
    assert all(vars(fn).items() >= vars(marked).items() for fn in (replaced_calls.count_taken, torch_flex_call._count_traced))
