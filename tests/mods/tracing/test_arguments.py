"""Every argument of a torch function inside a mod is used with torch's meaning or refused by name: none is dropped."""

from __future__ import annotations

import inspect
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import get_testing_overrides

from anyattn import ModError
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing.activations import ACTIVATIONS
from anyattn.mods.tracing.functions import FUNCTIONS
from anyattn.mods.tracing.trace import trace
from tests.support.covering import few

SCORES = torch.tensor([-1.75, -0.5, 0.0, 0.5, 2.25, float("nan")])
ROWS = len(SCORES)
COLUMN = torch.tensor(2)
table = torch.arange(12.0).reshape(3, 4)
one, half, two = 1, 0.5, 2
odd = 2**24 + 1  # no float32

REFUSED = {
    "round_unknown": (lambda s, b, h, q, k: torch.round(s, digits=1), "digits"),
    "view_dtype": (lambda s, b, h, q, k: s.view(torch.int32).float(), "view"),
    "view_size": (lambda s, b, h, q, k: s.view(7), "view"),
    "view_one": (lambda s, b, h, q, k: s.view(1), "view"),
    "view_captured": (lambda s, b, h, q, k: s.view(two), "view"),
    "reshape": (lambda s, b, h, q, k: s.reshape(2, 2), "reshape"),
    "reshape_function": (lambda s, b, h, q, k: torch.reshape(s, (1,)), "reshape"),
    "reshape_of_a_row": (lambda s, b, h, q, k: s + torch.reshape(table[h], (2, 2))[q, k], "table[h]"),
    "squeeze_of_a_row": (lambda s, b, h, q, k: s + torch.squeeze(table[h])[k], "table[h]"),
    "expand": (lambda s, b, h, q, k: s.expand(3), "expand"),
    "squeeze": (lambda s, b, h, q, k: s.squeeze(1), "dim=1"),
    "out": (lambda s, b, h, q, k: torch.exp(s, out=torch.empty(())), "out"),
    "in_place_flag": (lambda s, b, h, q, k: F.relu(s, inplace=True), "inplace"),
    "in_place_captured": (lambda s, b, h, q, k: s + table[0, 0].mul_(q), "mul_"),
    "max_over_dim": (lambda s, b, h, q, k: torch.max(s, 0) + q, "Extremes"),
    "max_over_captured_dim": (lambda s, b, h, q, k: torch.max(s, one), "dimension"),
    "min_over_dim": (lambda s, b, h, q, k: s.min(0) + q, "Extremes"),
    "min_keyword": (lambda s, b, h, q, k: s.min(dim=0) + q, "Extremes"),
    "rounding_mode": (lambda s, b, h, q, k: torch.div(s, q + 1, rounding_mode="down"), "rounding_mode"),
    "clamp_of_nothing": (lambda s, b, h, q, k: torch.clamp(s), "neither min nor max"),
    "alpha_of_mul": (lambda s, b, h, q, k: torch.mul(s, q, alpha=2), "alpha"),
    "alpha_of_ints": (lambda s, b, h, q, k: s + torch.add(q, k, alpha=0.5), "alpha"),
    "alpha_first": (lambda s, b, h, q, k: torch.add(s, 2, q), "add"),
    "where_alone": (lambda s, b, h, q, k: torch.where(q > k), "without"),
    "where_bits": (lambda s, b, h, q, k: torch.where(q, s, 0.0), "condition"),
    "where_unknown": (lambda s, b, h, q, k: torch.where(q > k, s, 0.0, dtype=torch.float64), "dtype"),
    "masked_fill": (lambda s, b, h, q, k: s + q.masked_fill(q > k, 0.5), "masked_fill"),
    "to_text": (lambda s, b, h, q, k: s.to("nowhere"), "nowhere"),
    "to_meta": (lambda s, b, h, q, k: s.to("meta"), "meta"),
    "to_channels_last": (lambda s, b, h, q, k: s.to(torch.float64, memory_format=torch.channels_last), "memory_format"),
    "to_number": (lambda s, b, h, q, k: s.to(torch.float16, 3), "non_blocking"),
    "to_two_numbers": (lambda s, b, h, q, k: s.to(1, True), "device"),
    "to_complex": (lambda s, b, h, q, k: (s.to(torch.complex64) > 0).float(), "complex"),
    "type_text": (lambda s, b, h, q, k: s.type("torch.DoubleTensor"), "x.to(torch.float32)"),
    "type_asked": (lambda s, b, h, q, k: s if s.type() == "torch.FloatTensor" else -s, "without"),
    "new_ones_size": (lambda s, b, h, q, k: s * s.new_ones(3), "new_ones"),
    "new_full_size": (lambda s, b, h, q, k: s * s.new_full((2,), 3.0), "new_full"),
    "like_requires_grad": (lambda s, b, h, q, k: s * torch.ones_like(s, requires_grad=True), "requires_grad"),
    "like_unknown": (lambda s, b, h, q, k: s * torch.ones_like(s, colour=1), "colour"),
    "tensor_of_score": (lambda s, b, h, q, k: torch.tensor(s), "gradient"),
    "tensor_pinned": (lambda s, b, h, q, k: s * torch.tensor(half, pin_memory=True), "pin_memory"),
    "tensor_of_lists": (lambda s, b, h, q, k: torch.tensor([[1.0, s]])[0, k], "list"),
    "negative_power": (lambda s, b, h, q, k: s + q**-1, "float"),
    "power_modulo": (lambda s, b, h, q, k: s + pow(q, 2, 7), "pow(q, 2, 7)"),
    "divmod": (lambda s, b, h, q, k: s + divmod(q, 2)[1], "divmod(q, 2)"),
    "index_of_a_list": (lambda s, b, h, q, k: s + [0.0, 1.0, 2.0][k], "torch.tensor"),
    "index_by_a_list": (lambda s, b, h, q, k: s + table[[q, k]], "list"),
    "bool_index": (lambda s, b, h, q, k: s + table[q, True], "bool"),
    "too_many": (lambda s, b, h, q, k: torch.exp(s, q), "2 arguments"),
    "captured_tensor_where": (lambda s, b, h, q, k: s + table[0, 0].where(q, 0.0), "condition"),
    "captured_tensor_shape": (lambda s, b, h, q, k: s + table.view(k, 6)[0, 0], "size"),
}


@pytest.mark.filterwarnings("ignore:This overload of add")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name):
    fn, word = REFUSED[name]
    with pytest.raises(ModError) as error:
        trace(fn, "score")
    message = str(error.value)
    assert word in message and __file__ in message, message


SAME = {
    "alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=half) - torch.sub(s, k, alpha=2) + torch.rsub(s, q, alpha=3),
    "alpha_promotes_first": lambda s, b, h, q, k: torch.add(s.double(), s.half(), alpha=1 / 3).float(),
    "alpha_of_bools": lambda s, b, h, q, k: torch.add(s, q > k, alpha=2),
    "to_python_types": lambda s, b, h, q, k: (
        (s.to(float) / 3).float() + torch.nan_to_num(s).to(int) + s.to(bool)
        if isinstance(s, torch.Tensor)
        else (s.to(float) / 3).float() + torch.where(s == s, s, 0.0).to(int) + s.to(bool)
    ),
    "to_everything": lambda s, b, h, q, k: s.to("cpu", torch.float16, True, copy=True).to(dtype=torch.float32, non_blocking=True),
    "to_other": lambda s, b, h, q, k: q.to(s) + k.to(tensor=table) + q.type_as(table),
    "fmin_and_fmax": lambda s, b, h, q, k: torch.fmax(s, q.half()) + torch.fmin(s, table[h, k]) + torch.fmax(q, k),
    "max_of_two": lambda s, b, h, q, k: torch.max(s, q.float()) + s.min(table[h, k]),
    "clamp_by_tensors": lambda s, b, h, q, k: torch.clamp(s, min=table[0, h], max=q.float()) + torch.clamp(q, max=k),
    "clamp_by_names": lambda s, b, h, q, k: torch.clamp(input=s, max=half) + s.clamp_min(min=-1) + torch.clamp_max(s, max=one),
    "div_modes": lambda s, b, h, q, k: torch.div(s, q - 2.5, rounding_mode="trunc") + torch.div(q - 3, k, rounding_mode="floor"),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q > k, half) + s.half().masked_fill(q > k, table[0, 1] / 3),
    "where_names": lambda s, b, h, q, k: torch.where(condition=q > k, input=s, other=0.0) + s.where(condition=q < k, other=1.0),
    "where_of_bools": lambda s, b, h, q, k: torch.where((q > k).where(q == 3, q < 2), 1.0, 2.0),
    "where_of_a_captured_bool": lambda s, b, h, q, k: torch.where((table[0, 0] < 1).where(q == 3, q < 2), 1.0, 2.0),
    "out_none": lambda s, b, h, q, k: torch.exp(s, out=None),
    "squares_of_conditions": lambda s, b, h, q, k: s + ((q == q) ** 2 + (q == q) ** 2 + torch.square(q > k)),
    "shape_of_one": lambda s, b, h, q, k: s.view(()).reshape(()).expand(()).squeeze().squeeze(0) + s.view(torch.float32),
    "constants": lambda s, b, h, q, k: s * s.new_ones(()) + s.new_full((), half) + torch.full_like(q, 2.5) + s.new_ones(size=()),
    "constant_dtypes": lambda s, b, h, q, k: s + torch.ones_like(q, dtype=torch.float16) / 3 + q.new_tensor(2.5) + s.new_zeros(()),
    "scalar_tensor": lambda s, b, h, q, k: torch.scalar_tensor(odd) - 2**24 + torch.tensor(two, dtype=torch.float64) * s,
    "captured_view": lambda s, b, h, q, k: s + table.view(2 * two, -1)[k, h] + table.reshape(two, 6)[0, k],
    "captured_sizes": lambda s, b, h, q, k: s + torch.arange(3 * two)[q] + torch.zeros(two, two)[h, 0] + table.roll(one, 1)[h, k],
    "numpy_index": lambda s, b, h, q, k: s + table[h, torch.tensor([1, 2]).numpy()[0]],
    "memory_formats": lambda s, b, h, q, k: s.clone(memory_format=torch.preserve_format).contiguous().float(),
    "no_copy": lambda s, b, h, q, k: s + torch.as_tensor(two, dtype=torch.float32, device="cpu"),
}


def by_calling(fn) -> torch.Tensor:
    return torch.stack([fn(SCORES[i], torch.tensor(0), torch.tensor(0), torch.tensor(i), COLUMN) for i in range(ROWS)]).float()


def evaluated(fn) -> torch.Tensor:
    traced = trace(fn, "score")
    return evaluate(traced, torch.tensor(0), torch.tensor(0), torch.arange(ROWS), COLUMN, score=SCORES).expand(ROWS)


@pytest.mark.parametrize("name", SAME)
def test_what_is_understood_has_torchs_meaning(name):
    fn = SAME[name]
    for _ in range(2):  # the second time from memory
        assert torch.equal(evaluated(fn).nan_to_num(777.0), by_calling(fn).nan_to_num(777.0))


def test_python_round_is_refused_as_by_a_tensor():
    with pytest.raises(ModError, match="__round__"):
        evaluated(lambda s, b, h, q, k: round(s, 1))


# ---- every torch function that a mod may call, with every argument of its signature

VALUES = {"score": lambda s, q, k: s, "half": lambda s, q, k: s.half(), "index": lambda s, q, k: q - 2, "bool": lambda s, q, k: q > k}
SECOND = {"same": lambda x, q, k: x, "one": lambda x, q, k: 1, "negative": lambda x, q, k: -2, "half": lambda x, q, k: 0.5,
          "index": lambda x, q, k: k, "bool": lambda x, q, k: q > k, "captured": lambda x, q, k: table[1, 2]}  # fmt: skip
OPTIONS = (None, True, False, 0, 1, -1, 2, 0.5, "floor", "trunc", "down", "cpu", torch.int32, torch.float16, torch.float64, float, int, (),
           (1,), torch.preserve_format, torch.channels_last, torch.strided, "q")  # fmt: skip
NAMES = ("out", "dtype", "memory_format", "copy", "alpha", "decimals", "dim", "size", "device")


def functions() -> dict[str, tuple[Any, list[str], int]]:
    """By a label: torch's function, the names of its optional arguments, how many it requires."""
    found = {}
    for func, stand_in in get_testing_overrides().items():
        name = getattr(func, "__name__", "")
        # torch's reflected methods answer NotImplemented where they are called with arguments of no operator
        # and activations, which are written out, are judged by their budget elsewhere
        if name.strip("_") not in FUNCTIONS or name.startswith("__") or name in ACTIVATIONS:
            continue
        parameters = inspect.signature(stand_in).parameters.values()
        required = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        optional = [p.name for p in parameters if p.default is not p.empty]
        found[f"{func!r}"] = (func, [*dict.fromkeys([*optional, *NAMES])], required)
    return found


def call_of(func: Any, required: int, value: str, second: str, name: str | None, option: Any) -> Any:
    is_method = getattr(torch.Tensor, func.__name__, None) is func  # Python finds a method of ours by its name only

    def given(s: Any, q: Any, k: Any) -> Any:
        x = VALUES[value](s, q, k)
        other = SECOND[second](x, q, k)
        args = [q > k, x, other] if func is torch.where else [x, other, x][:required]
        option_now = q if isinstance(option, str) and option == "q" else option
        called = func
        if is_method:
            called, args = getattr(x, func.__name__), args[1:]
        if name == "*":
            return called(*args, option_now)
        return called(*args) if name is None else called(*args, **{name: option_now})

    return given


def torchs(body: Any) -> tuple[Any, Any]:
    """dtype and values by torch; ("raises", None) or ("no number", None)."""
    try:
        found = [body(SCORES[i].clone(), torch.tensor(i), COLUMN) for i in range(ROWS)]
    except Exception:
        return "raises", None
    if not all(isinstance(x, torch.Tensor) and x.ndim == 0 for x in found):
        return "no number", None
    return found[0].dtype, torch.stack(found).float()


def ours(body: Any) -> tuple[Any, Any]:
    dtypes = []

    def mod(s, b, h, q, k):
        found = body(s, q, k)
        dtypes.append(found.dtype)
        return torch.where(found, 1.0, 0.0) if found.dtype is torch.bool else found.float()

    traced = trace(mod, "score")
    return dtypes[-1], traced


@pytest.mark.parametrize("seed", few(range(4), 0))
def test_any_argument_of_any_function_is_torchs_or_refused(seed):
    draw, table_of = random.Random(seed), functions()
    assert len(table_of) > 100
    labels, equal, refused = sorted(table_of), 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1500):
            func, optional, required = table_of[draw.choice(labels)]
            name, option = draw.choice([None, None, "*", *optional]), draw.choice(OPTIONS)
            if name == "out" and option is not None:
                continue
            value, second = draw.choice([*VALUES]), draw.choice([*SECOND])
            body = call_of(func, required, value, second, name, option)
            try:
                dtype, traced = ours(body)
            except ModError:
                refused += 1
                continue
            want_dtype, want = torchs(body)
            label = f"{func} of {value}, {second}, {name}={option!r}"
            if want_dtype == "raises":
                continue  # where torch takes no number, or only one of another dtype, ours may
            got = evaluate(traced, torch.tensor(0), torch.tensor(0), torch.arange(ROWS), COLUMN, score=SCORES).expand(ROWS)
            assert dtype == want_dtype, f"{label}: {dtype}, torch gives {want_dtype}"
            assert torch.equal(got.nan_to_num(777.0), want.nan_to_num(777.0)), f"{label}: {got}, torch gives {want}"
            equal += 1
    assert equal > 50 and refused > 500
