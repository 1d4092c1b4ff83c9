"""Autotuning without a GPU, the sources that are kept to be read, and what ``explain`` shows of them."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn import disk_cache, hardware, planner
from anyattn.disk_cache import DiskCache
from anyattn.explanation import Explanation
from anyattn.plan import Plan
from anyattn.validate import flex, sequences
from tests.support.command_line import call

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from anyattn.backends.triton import Repeater, api, autotune, backward_pass, tile_config
    from anyattn.triton_tools import jit_source
    from tests.support.triton import ahead


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ANYATTN_CACHE", raising=False)
    assert disk_cache.why_not(tmp_path / "kernels") is None
    autotune.forget()
    yield DiskCache(tmp_path / "kernels")  # type: ignore[misc]
    autotune.forget()


def launched(problem, wanted: tuple[int, int], monkeypatch, backward: bool = False):  # type: ignore[no-untyped-def]
    """The tiles of a tuned call's launches, where ``wanted`` are measured to be the fastest, and how many were measured."""
    measured = []

    def seconds(run_once, device):  # type: ignore[no-untyped-def]
        before = len(made)
        run_once()
        tried = [(x.options["TILE_M"], x.options["TILE_N"]) for x in made[before:] if "TILE_N" in x.options]
        measured.append(tried)
        if tried[-1] == (64, 64):
            raise RuntimeError("too many resources requested for launch")
        return 1.0 if wanted in tried else 2.0

    monkeypatch.setattr(autotune, "seconds", seconds)
    chosen = ahead.planned(problem, (9, 0), {"autotune": True})
    with ahead.caught((9, 0)) as made:
        repeater = Repeater(problem, chosen)
        found = repeater.forward(problem)
        if backward:
            made.clear()
            measured.clear()
            repeater.backward(problem, found.out, found.lse, found.out, None)  # type: ignore[arg-type]
    last = [x for x in made if "TILE_N" in x.options][-2 if backward else -1 :]
    return [(x.options["TILE_M"], x.options["TILE_N"]) for x in last], len(measured)


def test_the_fastest_is_remembered(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    causal = lambda b, h, q, k: q >= k
    problem = ahead.problem_of(None, causal)
    with monkeypatch.context() as patch:
        found, count = launched(problem, (128, 64), patch)
        assert found == [(128, 64)] and 4 <= count <= 10
        assert launched(problem, (128, 128), patch) == ([(128, 64)], 0), "in memory"
        autotune.forget()
        assert launched(ahead.problem_of(None, causal, length=1000), (128, 128), patch) == ([(128, 64)], 0), "on disk, whatever the length"
        other, count = launched(ahead.problem_of(None, causal, dim=64), (64, 128), patch)
        assert other == [(64, 128)] and count, "another head dimension is another question"
        assert launched(ahead.problem_of(lambda s, b, h, q, k: s * 2, causal), (128, 128), patch)[1], "another mod too"
        both, count = launched(ahead.problem_of(None, causal, has_grad=True), (32, 128), patch, backward=True)
        assert both[1] == (32, 128) and count, "each kernel of the backward pass has its own"
    code, out, _ = call("cache", "list")
    assert code == 0 and "tiles of forward: 1 range = 128 x 64" in " ".join(out.split()) and "bfloat16" in out and "tiles of dkdv" in out
    assert call("cache", "clear")[0] == 0 and not cache.entries()


def test_what_is_not_launched_is_not_measured(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile takes the same time there, and the first of them would be remembered for calls that do launch it."""
    without, full = ahead.problem_of(), ahead.problem_of(has_grad=True)
    launched(full.like(k=without.k, v=without.v), (64, 32), monkeypatch, backward=True)
    assert {e.facts["name"].split(":")[0] for e in cache.entries()} == {"tiles of forward", "tiles of dq"}
    assert launched(full, (64, 128), monkeypatch, backward=True)[0][1] == (64, 128)


def test_what_is_kept_but_no_candidate_is_not_used(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another version, whose tiles may not fit."""
    problem = ahead.problem_of()
    question = autotune.forward_question(problem, api.program_of(problem).program, 1, 1)
    cache.get_or_make(question.key, lambda: disk_cache.Payload(b"", {"tiles": [512, 512, 4, 9]}))
    default = tile_config.candidates("forward", question.shape, (9, 0), 256, False, 1)[0]
    found, count = launched(problem, (64, 32), monkeypatch)
    assert count == 0 and found == [(default.tile_m, default.tile_n)]


def asked(door: Callable[[], Any], capability: tuple[int, int] = (9, 0)) -> tuple[autotune.Question, Plan]:
    """What the forward pass of a call would ask if it were tuned, and its plan as it is not."""
    seen: list[tuple[autotune.Question, Plan]] = []

    def launch(form_plan: Any, target: Any) -> None:
        form, plan, _ = form_plan
        program = api.program_of(form.problem).program
        seen.append((autotune.forward_question(form.problem, program, plan.heads_per_tile, plan.num_splits), plan))

    with ahead.on(capability), pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_launch", launch)
        patch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
        door()
    return seen[0]


def decoding(page_size: int, leftpad: bool = False) -> autotune.Question:
    pools = [torch.zeros(8, page_size, 1, 64, dtype=torch.bfloat16) for _ in "kv"]
    places = {"page_table": torch.arange(8, dtype=torch.int32)[None], "cache_seqlens": torch.tensor([page_size], dtype=torch.int32)}
    if leftpad:
        places["cache_leftpad"] = torch.zeros(1, dtype=torch.int32)
    q = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    return asked(lambda: anyattn.flash_attn_with_kvcache(q, *pools, **places, num_splits=1, backend="triton"))[0]


def test_pages_are_asked_about_by_the_tiles_that_fit() -> None:
    """Of twelve sizes six questions, for to measure takes its time."""
    same = ((16,), (32,), (64,), (48, 80), (128, 256, 384, 512), (5, 24, 40))
    found = [{decoding(size) for size in sizes} for sizes in same]
    assert all(len(questions) == 1 for questions in found) and len(set.union(*found)) == len(same), found
    assert decoding(16, leftpad=True) == decoding(5) == decoding(128, leftpad=True), "tiles begin anywhere, and fit no page"


def few(
    heads: int, rows: int, lists: bool = False, sink: bool = False, capability: tuple[int, int] = (9, 0), **options: Any
) -> tuple[autotune.Question, Plan]:
    q, k = torch.zeros(1, heads, rows, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 300, 64, dtype=torch.bfloat16)
    more = {"mask_mod": (lambda b, h, i, j: (i + j) % 3 != 1) if lists else None, "sink": torch.zeros(heads) if sink else None}
    return asked(lambda: anyattn.flex_attention(q, k, k, enable_gqa=True, backend="triton", kernel_options=options, **more), capability)


def test_what_else_makes_another_kernel() -> None:
    one = {"num_splits": 1}
    questions = [few(8, 1, **one)[0], few(8, 1, pack_gqa=False, **one)[0], few(8, 1, sink=True, **one)[0], few(8, 1, num_splits=2)[0]]
    assert len(set(questions)) == 4, questions
    assert few(8, 1, sink=True, num_splits=2)[0] == questions[3], "the sink joins where pieces are merged"
    assert few(7, 1, **one)[0] == questions[0], "as many rows of a position"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_the_default_is_measured(capability: tuple[int, int]) -> None:
    """Whatever is measured besides, what would be taken untuned comes first; and no tile is too small for a position's rows."""
    for heads, rows, lists in itertools.product((1, 8, 16), (1, 4, 16, 40, 300), (False, True)):
        question, plan = few(heads, rows, lists, capability=capability)
        first, *others = tile_config.candidates("forward", question.shape, capability, *question.rows)
        assert (first.tile_m, first.tile_n, first.num_warps) == (plan.tile_m, plan.tile_n, plan.num_warps), (question, plan)
        assert all(t.tile_m >= plan.heads_per_tile for t in (first, *others))


def test_kernels_of_a_backward_pass_that_differ() -> None:
    table = torch.zeros(4, requires_grad=True)
    every = ahead.problem_of(lambda s, b, h, q, k: s + table[h], has_grad=True)
    frozen = ahead.problem_of(lambda s, b, h, q, k: s + table.detach()[h], has_grad=True)
    without = every.like(q=every.q.detach(), v=every.v.detach())
    program, words = api.program_of(every).program, backward_pass._words_of
    found = {n: [autotune.backward_question(n, p, program, words(n, p)) for p in (every, frozen, without)] for n in tile_config.PASSES[1:]}
    assert len(set(found["dq"])) == 3 and len(set(found["dkdv"])) == 2 and found["dkdv"][0] == found["dkdv"][1], found
    assert "gradients of captured 0" in found["dq"][0].kind and "without dv" in found["dkdv"][2].kind


def test_without_a_disk(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_CACHE", "0")
    assert launched(ahead.problem_of(), (128, 64), monkeypatch)[1] > 0 and not cache.entries()


def test_options() -> None:
    assert flex.kernel_options({"autotune": True}) == {"autotune": True}
    q = torch.zeros(1, 2, 16, 16)
    for options, error, words in (
        ({"autotune": 1}, TypeError, "True or False"),
        ({"autotune": True, "tile_m": 64}, ValueError, "autotune measures tiles"),
        ({"autotun": True}, ValueError, "autotune"),
    ):
        with pytest.raises(error, match=words):
            anyattn.flex_attention(q, q, q, kernel_options=options)
    out = anyattn.flex_attention(q, q, q, kernel_options={"autotune": True})
    assert torch.equal(out, anyattn.flex_attention(q, q, q))
    chosen = planner.choose(ahead.problem_of(), hardware.of("cpu"), None, {"autotune": True})
    assert "no tiles to measure" in " ".join(chosen.why)


def test_tiles_that_are_too_large_are_an_error() -> None:
    """Not one from inside Triton, and not one where fewer stages do."""
    problem = ahead.problem_of()
    with pytest.raises(ValueError, match=r"tile_n=1024 take \d+ KiB of shared memory, and a GPU has 227"):
        ahead.planned(problem, (9, 0), {"tile_m": 64, "tile_n": 1024})
    assert ahead.planned(problem, (9, 0), {"tile_n": 256}).num_stages == 1
    with pytest.raises(
        ValueError, match=r"tile_n=100 in kernel_options.* wanted a power of two of at least 16 for this backend, such as 128"
    ):
        ahead.planned(problem, (9, 0), {"tile_n": 100})
    narrow = ahead.problem_of(dim=16)  # whose tiles of keys would find their shared memory, and Triton refuses
    with pytest.raises(ValueError, match=r"tile_m=2048, tile_n=1024 in kernel_options are .* 2097152 scores.* 65536 registers"):
        ahead.planned(narrow, (9, 0), {"tile_m": 2048, "tile_n": 1024})
    assert ahead.planned(narrow, (9, 0), {"tile_m": 256, "tile_n": 256}).tile_n == 256


def test_sources_are_kept_to_be_read(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def f():\n    return 1\n"
    jit_source.load(text, f"test_{jit_source.digest(str(cache.folder))}")
    (path,) = cache.texts()
    assert path.read_text() == disk_cache.TEXT_HEADER + text and path.stat().st_mode & 0o077 == 0
    code, out, _ = call("cache", "list")
    assert code == 0 and "1 source of Triton kernels" in out and "no kernels" in out
    assert call("cache", "clear")[0] == 0 and not cache.texts()
    monkeypatch.setenv("ANYATTN_CACHE", "0")
    jit_source.load(text + "#", f"test_{jit_source.digest(str(cache.folder))}")
    assert not cache.texts()


def test_explain_shows_the_source() -> None:
    """Where there is a GPU, and, from the command line, where there is none."""
    code, out, err = call("explain", "alibi", "--backend", "triton", "--dtype", "bfloat16")
    assert code == 0 and "def score_value(score, b, h, kv_idx, rows, scalars, tensors):" in out and "@triton.jit" in out, (out, err)
    assert "cannot run here" in out
    q = torch.zeros(1, 2, 64, 16)
    shown = Explanation((), planner.choose(ahead.problem_of(), hardware.of("cpu")), {}, "@triton.jit\ndef f(): pass")
    assert "    @triton.jit" in str(shown) and "source" not in str(anyattn.explain(q, q, q))
