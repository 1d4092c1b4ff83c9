"""torch's activations and other compound functions inside a mod: values and derivatives are torch's, in float64 and at the edges."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from anyattn.errors import ModError
from anyattn.mods.analysis.evaluate import evaluate, run
from anyattn.mods.ir.grad import score_gradients
from anyattn.mods.tracing.trace import trace

S = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
T = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
KINKS = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0, 6.0, 20.0, -20.0, 50.0, -50.0, 700.0, -700.0, 1e-8, -1e-8], dtype=torch.float64)
beta = 1.7

ONE = {
    "silu": F.silu,
    "silu_module": torch.nn.SiLU(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, beta, 5.0),
    "softplus_keywords": lambda x: F.softplus(x, beta=0.5, threshold=30),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "leaky_relu": F.leaky_relu,
    "leaky_relu_slope": lambda x: F.leaky_relu(x, beta),
    "elu": F.elu,
    "elu_alpha": lambda x: F.elu(x, alpha=beta),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "hardtanh": F.hardtanh,
    "hardtanh_limits": lambda x: F.hardtanh(x, -0.5, max_val=beta),
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "softsign": F.softsign,
    "tan": torch.tan,
    "atan": torch.atan,
    "arctan": torch.arctan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "erfinv": lambda x: torch.erfinv(x / 1000),
    "special_erfinv": lambda x: torch.special.erfinv(torch.sin(x)),
    "special_expm1": lambda x: torch.special.expm1(x / 9),
    "special_round": lambda x: torch.special.round(x) * x,
    "frac": torch.frac,
    "round_decimals": lambda x: torch.round(x, decimals=2) * x,
    "round_tens": lambda x: torch.round(x, decimals=-1) + x,
    "logit": lambda x: torch.logit(torch.sin(x) * 0.49 + 0.5),
    "logit_eps": lambda x: torch.logit(x / 10, 0.1) + x.logit(eps=1e-3),
    "special_logit": lambda x: torch.special.logit(torch.sigmoid(x / 9), eps=0.2),
    "special_expit": torch.special.expit,
    "special_erf": torch.special.erf,
    "detach": lambda x: x.detach() * torch.tanh(x) + torch.detach(x * x) - torch.exp(x.detach() - x),
    "power_of_two": lambda x: 2**x + 3.0**x,
    "nan_to_num": lambda x: torch.nan_to_num(torch.log(x), beta, 7.0, -9.0),
    "nan_to_num_default": lambda x: torch.nan_to_num(x * 2),
}
TWO = {
    "atan2": torch.atan2,
    "arctan2": torch.arctan2,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "xlogy": lambda x, y: torch.xlogy(x, abs(y)) + torch.xlogy(2, y * y) + torch.xlogy(x, 3.0),
    "special_xlogy": lambda x, y: torch.special.xlogy(torch.floor(x), y * y + 0.1),
    "detached_table": lambda x, y: x * y.detach() + torch.tanh(x.detach() * y) + (x * y).detach(),
    "logaddexp2": torch.logaddexp2,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp_from_end": lambda x, y: torch.lerp(x, y, beta),
    "lerp_weight": lambda x, y: torch.lerp(x, y, torch.sigmoid(y)),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=beta),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x * x + 1),
}

# what torch differentiates with factors rounded to float32, whatever the dtype, written out
WRITTEN_OUT = {
    "selu": lambda x: 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * torch.expm1(torch.where(x > 0, 0, x))),
    "celu": lambda x: torch.where(x > 0, x, 0.7 * torch.expm1(torch.where(x > 0, 0, x) / 0.7)),
    "hardsigmoid": lambda x: torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, (x + 3) / 6)),
    "lerp": lambda x, y: x + 0.3 * (y - x),
    "lerp_from_end": lambda x, y: y - (1 - beta) * (y - x),
}


def both(fn, *inputs, reference=None):
    """(value, derivatives): by a trace, and by torch's own function."""
    table = torch.zeros(1, dtype=torch.float64) if len(inputs) == 1 else inputs[1].clone().requires_grad_()
    at = torch.arange(len(inputs[0]))
    traced = trace(lambda s, b, h, q, k: fn(s, *([table[k]] if len(inputs) > 1 else [])), "score", score_dtype=torch.float64)
    score = inputs[0]
    with torch.no_grad():
        ours = evaluate(traced, 0, 0, at, at, score)
        gradients = score_gradients(traced.expr)
        leaves = {"b": 0, "h": 0, "q_idx": at, "kv_idx": at, "score": score}
        found = run(gradients.expr, leaves, traced.scalars, traced.tensors)
        parts = [found[0], *(found[load.output] for load in gradients.loads)]
        derivatives = [torch.as_tensor(parts[0], dtype=torch.float64).expand(score.shape)]
        if len(inputs) > 1:
            derivatives.append(sum(torch.as_tensor(p, dtype=torch.float64) for p in parts[1:]) + torch.zeros_like(score))
    wanted = [x.clone().requires_grad_() for x in inputs]
    value = (reference or fn)(*wanted)
    theirs = torch.autograd.grad(value.sum() + sum(0 * w.sum() for w in wanted), wanted)
    return (ours, *derivatives), (value.detach(), *theirs)


def agree(name, fn, *inputs, ulps=64):
    for got, want in zip(*both(fn, *inputs, reference=WRITTEN_OUT.get(name)), strict=True):
        equal = (got == want) | (got.isnan() & want.isnan())
        room = ulps * torch.finfo(torch.float64).eps * torch.maximum(want.abs(), torch.ones_like(want))
        close = torch.isfinite(want) & ((got - want).abs() <= room)
        assert bool((equal | close).all()), [t[~(equal | close)] for t in (inputs[0], got, want)]


@pytest.mark.parametrize("name", ONE)
def test_of_one(name):
    agree(name, ONE[name], S)
    agree(name, ONE[name], KINKS[KINKS != 0] if name == "nan_to_num" else KINKS)  # torch makes NaN of 0 * inf


@pytest.mark.parametrize("name", TWO)
def test_of_two(name):
    agree(name, TWO[name], S, T)


@pytest.mark.parametrize("name", ["logaddexp", "logaddexp2", "hypot", "atan2"])
def test_a_tie_is_shared_as_torch_shares_it(name):
    agree(name, TWO[name], S, S)


LEVELS = torch.tensor([-1.0, -0.0, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
EXTREMES = {
    "maximum": lambda x, t: torch.maximum(x, t),
    "minimum": lambda x, t: torch.minimum(x, t),
    "fmax": lambda x, t: torch.fmax(x, t),
    "fmin": lambda x, t: torch.fmin(x, t),
    "clamp": lambda x, t: torch.clamp(x, 0.0, 1.0) * (t + 3),
    "clamp by tensors": lambda x, t: torch.clamp(x, t, t + 1),
    "clamp between tensors": lambda x, t: torch.clamp(x, t, 1.5 - abs(t)) + torch.clamp(t, x, t) + torch.clamp(x, t, t),
    "clamp by equal tensors": lambda x, t: torch.clamp(x, torch.abs(t), abs(t)),
    "clamp to one number": lambda x, t: torch.clamp(x, 1.0, 1.0) + torch.clamp(t, 2.0, 1.0) + t.clamp(0.5, 1.0),
    "clamp, min": lambda x, t: x.clamp(min=t),
    "clamp, max": lambda x, t: torch.clip(x, max=t),
    "clamp_min": lambda x, t: torch.clamp_min(x, 0) * (t + 3) + torch.clamp_min(t, x),
    "clamp_max": lambda x, t: torch.clamp_max(x, 1) * (t + 3) + torch.clamp_max(t, x),
    "relu": lambda x, t: torch.relu(x) * (t + 3) + F.relu(t),
    "nested": lambda x, t: torch.relu(torch.clamp(x, min=t) - torch.maximum(x, t)),
    "softplus": lambda x, t: F.softplus(x) * F.logsigmoid(t),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_who_has_the_derivative_of_a_tie(name):
    """A learned table that begins with zeros lies on the edge of relu and clamp."""
    agree(name, EXTREMES[name], LEVELS.repeat(6), LEVELS.repeat_interleave(6))


EDGES = torch.tensor([0.0, -0.0, 1e-300, 1e300, -1e300, math.inf, -math.inf, math.nan, 88.0, -88.0, 1.0, -1.0], dtype=torch.float64)
# finite limits of infinities, or products of them, which torch rounds its own way
NO_EDGES = {"selu", "celu", "nan_to_num_default", "hardswish"}


@pytest.mark.parametrize("name", [n for n in ONE if n not in NO_EDGES])
def test_values_at_the_edges(name):
    """Zeros, huge numbers, infinities, NaN: what torch gives."""
    got, want = ((x,) for x in (both(ONE[name], EDGES)[i][0] for i in (0, 1)))
    equal = (got[0] == want[0]) | (got[0].isnan() & want[0].isnan())
    close = torch.isfinite(want[0]) & ((got[0] - want[0]).abs() <= 8 * torch.finfo(torch.float64).eps * want[0].abs())
    assert bool((equal | close).all()), [t[~(equal | close)] for t in (EDGES, got[0], want[0])]


@pytest.mark.parametrize("name", [n for n in TWO if n.startswith(("atan2", "hypot", "logaddexp"))])
def test_pairs_at_the_edges(name):
    a, b = (t.flatten() for t in torch.meshgrid(EDGES, EDGES, indexing="ij"))
    table = b
    at = torch.arange(len(a))
    got = evaluate(trace(lambda s, b_, h, q, k: TWO[name](s, table[k]), "score", score_dtype=torch.float64), 0, 0, at, at, a)
    want = TWO[name](a, b)
    equal = (got == want) | (got.isnan() & want.isnan())
    close = torch.isfinite(want) & ((got - want).abs() <= 8 * torch.finfo(torch.float64).eps * want.abs().clamp(min=1))
    assert bool((equal | close).all()), [t[~(equal | close)] for t in (a, b, got, want)]


@pytest.mark.parametrize("name", ["softplus", "logsigmoid", "mish", "silu", "gelu", "gelu_tanh", "softsign", "elu", "hardswish"])
def test_float32_keeps_its_digits(name):
    """Within 8 roundings of the float64 value, or of the argument where the function's own formula in torch cancels."""
    x = torch.linspace(-30, 30, 3001)
    got = evaluate(trace(lambda s, b, h, q, k: ONE[name](s), "score"), 0, 0, 0, 0, x)
    want = ONE[name](x.double())
    cancels = name in ("gelu", "gelu_tanh")
    room = 8 * torch.finfo(torch.float32).eps * (x.abs() if cancels else want.abs()) + torch.finfo(torch.float32).tiny
    assert bool(((got - want).abs() <= room).all())


CHECKS = {
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    "isposinf": torch.isposinf,
    "isneginf": torch.isneginf,
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8])
def test_nan_and_infinities_as_masks(name, dtype):
    table = EDGES.to(dtype) if dtype.is_floating_point else torch.arange(len(EDGES)).to(dtype)
    traced = trace(lambda b, h, q, k: CHECKS[name](table[k]), "mask")
    got = evaluate(traced, 0, 0, 0, torch.arange(len(table)))
    assert torch.equal(got, CHECKS[name](table))


@pytest.mark.parametrize("values", [torch.tensor(0.5), torch.tensor(-2.0)])
def test_heaviside(values):
    x = torch.cat([EDGES.float(), S.float()])
    got = evaluate(trace(lambda s, b, h, q, k: torch.heaviside(s, values), "score"), 0, 0, 0, 0, x)
    assert torch.equal(got, torch.heaviside(x, values))


@pytest.mark.parametrize("decimals", [0, 1, 3, -1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_to_decimals_is_torchs(decimals, dtype):
    table = (S * 77).to(dtype)
    traced = trace(lambda s, b, h, q, k: s + torch.round(table[k], decimals=decimals).to(s.dtype), "score", score_dtype=torch.float64)
    got = evaluate(traced, 0, 0, 0, torch.arange(len(S)), torch.zeros(1, dtype=torch.float64))
    assert torch.equal(got, torch.round(table, decimals=decimals).double())


@pytest.mark.parametrize("method", ["tan", "atan", "sinh", "cosh", "erfinv", "frac", "nan_to_num", "isnan", "isinf"])
def test_tensor_methods(method):
    x = torch.sin(S)
    got = evaluate(trace(lambda s, b, h, q, k: getattr(s, method)() * 1.0, "score", score_dtype=torch.float64), 0, 0, 0, 0, x)
    assert torch.equal(got, getattr(x, method)() * 1.0)


def test_methods_of_two():
    got = trace(lambda s, b, h, q, k: s.atan2(s + 1) + s.hypot(s) + s.lerp(s * 2, 0.25) + s.addcmul(s, s) + s.logaddexp(s), "score")
    x = S.float()
    want = x.atan2(x + 1) + x.hypot(x) + x.lerp(x * 2, 0.25) + x.addcmul(x, x) + x.logaddexp(x)
    room = 8 * torch.finfo(torch.float32).eps * (1 + x.abs()) ** 2 * 4
    assert bool(((evaluate(got, 0, 0, 0, 0, x) - want).abs() <= room).all())


def test_atan2_of_whole_numbers_is_real():
    q = torch.arange(9)
    got = evaluate(trace(lambda s, b, h, q, k: s + torch.atan2(q, k - 4), "score"), 0, 0, q[:, None], q, torch.zeros(1))
    assert torch.equal(got, torch.atan2(q[:, None], q - 4).expand(9, 9))


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: F.silu(x, inplace=True), "inplace=True"),
        (lambda x: F.gelu(x, approximate="fast"), "approximate='fast'"),
        (lambda x: F.silu(x.to(torch.int64)), "takes floats"),
        (lambda x: torch.hypot(x.to(torch.int64), x.to(torch.int64)), "hypot"),
        (lambda x: torch.round(x.to(torch.int64), decimals=1), "takes floats"),
        (lambda x: torch.heaviside(x, torch.tensor(1)), "one dtype"),
        (lambda x: torch.addcdiv(x, torch.tensor(1), torch.tensor(2)), "whole numbers"),
        (lambda x: torch.special.bessel_j0(x), "special_bessel_j0"),
    ],
)
def test_what_torch_refuses_or_nobody_knows_is_refused(f, words):
    with pytest.raises(ModError, match=words) as error:
        trace(lambda s, b, h, q, k: f(s), "score")
    assert __file__ in str(error.value)
