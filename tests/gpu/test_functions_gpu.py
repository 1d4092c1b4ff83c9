"""torch's functions in Triton texts on a GPU against torch on a CPU: every function, dtype by dtype."""

from __future__ import annotations

import pytest
import torch

from anyattn.mods.tracing.trace import trace
from anyattn.triton_tools.emit import PLAIN
from tests.support.gpu import judging
from tests.support.torch_functions import CASES, DTYPES, arguments, wrong
from tests.support.triton.texts import COLUMNS, ROWS, by_triton

pytestmark = [pytest.mark.gpu, judging.on_the_gpu_alone]
judging.needs_the_backend(only="triton")


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_functions_of_captured_values_are_torchs(name: str, dtype: torch.dtype) -> None:
    """Of 16 bits within a unit in the last place, of float32 within 4 roundings."""
    f, count, terms = CASES[name]
    table = arguments(count, dtype, ROWS * COLUMNS)
    theirs, values = f(*table), table.double()
    room = float(name == "erf") if terms is None else terms(*values)
    table = table.cuda()
    mod = lambda s, b, h, q, k: f(*(table[n, q * COLUMNS + k] for n in range(count))).double()
    traced = trace(mod, "score", score_dtype=torch.float64, device="cuda")
    score = torch.zeros(ROWS, COLUMNS, dtype=torch.float64, device="cuda")
    ours = by_triton(traced, PLAIN._replace(is_nvidia=torch.version.cuda is not None), score, 0).flatten().cpu()
    bad = wrong(ours, theirs, 4, room)
    assert not bad.any(), (table.cpu()[:, bad], ours[bad], theirs[bad])


@pytest.mark.parametrize(
    "f", [torch.nn.functional.silu, torch.sigmoid, torch.exp, torch.tanh, torch.expm1, torch.sinh, torch.cosh], ids=lambda f: f.__name__
)
def test_functions_of_float32_scores_are_as_exact_as_torchs(f) -> None:  # type: ignore[no-untyped-def]
    """At most 1 unit in the last place further from the true value than torch's worst on the same card."""
    score = torch.linspace(-60, 60, ROWS * COLUMNS, device="cuda").view(ROWS, COLUMNS)
    ours = by_triton(trace(lambda s, b, h, q, k: f(s), "score", device="cuda"), PLAIN._replace(is_nvidia=True), score, 0)
    true = f(score.double())
    unit = torch.exp2(torch.floor(torch.log2(true.abs().clamp(min=2.0**-126)))) * 2.0**-23
    worst = [((found.double() - true).abs() / unit).max().item() for found in (ours, f(score))]
    assert worst[0] <= worst[1] + 1, worst
