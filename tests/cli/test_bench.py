"""``anyattn bench``: what it times and judges, what it says of peers that cannot take part, and its mistakes."""

from __future__ import annotations

import json

import pytest
import torch

from anyattn import masks, scores
from anyattn.cli import BAD_ARGUMENTS, bench, bench_report
from anyattn.gallery import Mods
from anyattn.testing.harness import dense, peers, runner, timing
from anyattn.testing.harness.case import OURS, Case, Record, Shape, Timing
from anyattn.testing.harness.inputs import Inputs
from anyattn.testing.harness.native import native_options
from anyattn.testing.harness.variants import Variant
from tests.support.command_line import call

PNG, SVG = b"\x89PNG", b"<?xml"
QUICK = ("--heads", 2, "--head-dim", 16, "--rounds", 3, "--seconds", 0, "--patience", 0)
DENSE = ("--peer", "sdpa", "--peer", "sdpa-mask", "--peer", "sdpa-bias", "--peer", "eager")


@pytest.fixture
def mods(tmp_path):
    path = tmp_path / "mods.py"
    path.write_text(
        "def near(b, h, q_idx, kv_idx):\n    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)\n\n"
        "def by_head(b, h, q_idx, kv_idx):\n    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20 * (h + b + 1))\n\n"
        "def halved(score, b, h, q_idx, kv_idx):\n    return score * 0.5\n\n"
        "def broken(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx and q_idx > 3\n"
    )
    return path


def figures(*arguments: object) -> tuple[int, list[Record]]:
    code, out, err = call("bench", *arguments, *QUICK, "--json", "-")
    assert out, err
    return code, [Record.from_json(case) for case in json.loads(out)["cases"]]


def test_both_passes_of_each_length_are_judged_then_timed(mods, tmp_path):
    picture = tmp_path / "speed.svg"
    code, out, err = call("bench", f"{mods}:near", "--seqlen", 96, "--seqlen", 130, *QUICK, *DENSE, "--out", picture)
    assert code == 0, err
    assert out.count("anyattn is") >= 4 and "as fast as the best peer" in out and picture.read_bytes().startswith(SVG)
    assert "SDPA has no name for this mask" in out and "there is no score mod" in out


def test_figures_hold_every_round_and_the_share_of_the_budget(mods, tmp_path):
    code, records = figures(f"{mods}:near", f"{mods}:halved", "--seqlen", 96, *DENSE)
    assert code == 0 and len(records) == 2
    for record in records:
        assert set(record.timings) == {OURS, "eager"} and record.budget[OURS] <= 1 and record.flops > 0
        assert all(len(t.seconds) == 3 for t in record.timings.values())
        assert set(record.unavailable) == {"sdpa", "sdpa-mask", "sdpa-bias"}


def test_a_mask_of_entries_and_heads_is_counted_and_judged_for_each(mods):
    code, records = figures(f"{mods}:by_head", "--seqlen", 100, "--batch", 2, "--pass", "forward", "--peer", "sdpa-mask", "--peer", "eager")
    rows, keys = torch.arange(100)[:, None], torch.arange(100)
    wanted = sum(int(((rows >= keys) & (rows - keys < 20 * (h + b + 1))).sum()) for b in range(2) for h in range(2))
    assert code == 0 and records[0].extra["pairs"] == wanted
    assert max(records[0].difference.values()) < 1e-3 and set(records[0].timings) == {OURS, "sdpa-mask", "eager"}


def test_grouped_heads_are_given_to_every_peer():
    code, records = figures("causal", "--seqlen", 70, "--heads-kv", 1, *DENSE)
    assert code == 0
    for record in records:
        assert set(record.timings) == {OURS, "sdpa", "sdpa-mask", "eager"} and max(record.difference.values()) < 1e-3


def test_peers_that_need_a_gpu_are_named_with_the_reason():
    code, records = figures("--seqlen", 40, "--pass", "forward", "--peer", "fa3", "--peer", "flash-attn", "--peer", "sdpa")
    assert code == 0 and set(records[0].timings) == {OURS, "sdpa"}
    assert records[0].unavailable == {"fa3": "fa3 does not run on cpu", "flash-attn": "flash-attn does not run on cpu"}


def test_a_wrong_result_is_not_timed_and_ends_with_status_1(monkeypatch):
    monkeypatch.setattr(runner.Judge, "share", lambda self, result: 1.5)
    code, out, _ = call("bench", "causal", "--seqlen", 64, "--pass", "forward", "--peer", "sdpa", *QUICK)
    assert code == 1 and "refused: anyattn's result is wrong here (it uses 1.5 of its error budget)" in " ".join(out.split())


def test_dense_matrices_that_do_not_fit_are_refused_in_words(monkeypatch):
    monkeypatch.setattr(peers, "DENSE_BYTES", 2**16)
    code, records = figures("causal", "--seqlen", 128, "--pass", "forward", *DENSE)
    assert code == 0 and set(records[0].timings) == {OURS, "sdpa"}
    assert "dense matrices of 1 x 2 x 128 x 128 pairs take" in records[0].unavailable["eager"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "cuda"), "torch finds no CUDA device here; leave it out to time the CPU"),
        (("--heads-kv", 3), "wanted a multiple of --heads-kv, such as --heads 6"),
        (("causal", "sliding_window"), "'sliding_window' is a second mask; wanted at most one: compose them, 'causal() & document(...)'"),
        (("alibi", "softcap(2.0)"), "'softcap(2.0)' is a second score mod; wanted at most one: chain them with .then"),
        (("no_such",), "'no_such' is not a mask or score mod"),
        (("--json", __file__ + "/figures.json"), "no file can be written there"),
        (("--out", __file__ + "/speed.svg"), "no file can be written there"),
        (("--out", "speed.pdf"), "the name must end in .png or .svg"),
        (("--seqlen", 2**22, "--heads", 4096), "GiB: fewer positions, heads or batch entries"),
    ],
)
def test_mistakes_end_in_one_line_that_names_a_way_out(arguments, said):
    if arguments[0] == "--device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, _, err = call("bench", *arguments)
    assert code == BAD_ARGUMENTS and said in err and err.count("\n") == 1


def test_a_mod_that_cannot_be_traced_shows_its_line(mods):
    code, _, err = call("bench", f"{mods}:broken")
    assert code == BAD_ARGUMENTS and "return q_idx >= kv_idx and q_idx > 3" in err


def test_every_peer_of_the_command_is_one_of_the_harness():
    assert set(bench.PEER_NAMES) <= set(peers.PEERS)


# ---- options of FlashAttention that mean the same as a mask


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {}),
        (masks.full(), {}),
        (masks.causal(), {"causal": True}),
        (lambda b, h, q_idx, kv_idx: kv_idx - q_idx < 1, {"causal": True}),
        (masks.sliding_window(5, 0), {"window_size": (5, 0)}),
        (masks.sliding_window(5, 2), {"window_size": (5, 2)}),
        (masks.causal(offset=3), {"window_size": (-1, 3)}),
        (lambda b, h, q_idx, kv_idx: kv_idx >= q_idx, {"window_size": (0, -1)}),
        (masks.prefix_lm(10), None),
        (masks.block_diagonal(16), None),
        (masks.sink_window(2, 8), None),
        (masks.sliding_window(5, 0, offset=-7), None),
        (lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= h, None),
        (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx != 20), None),
    ],
)
def test_masks_that_flash_attention_has_an_option_for(mask, options):
    assert native_options(Mods(mask), 40, "cpu") == options


def test_a_score_mod_has_no_option():
    assert native_options(Mods(None, scores.head_bias(torch.ones(2))), 16, "cpu") is None


def test_a_dense_bias_holds_the_mask_and_the_score_mod():
    mods = Mods(masks.causal(), scores.alibi(torch.tensor([0.5, 0.25])))
    inputs = Inputs(Case("t", "flex", "x", Shape.square(33, heads=2, head_dim=16)), variant=Variant(lambda setting: mods))
    results = [peers.PEERS[name].entry(name, inputs)[0]() for name in ("sdpa-bias", "eager", OURS)]
    assert all(torch.allclose(result, results[-1], atol=1e-5) for result in results)
    assert dense.is_additive(mods) and not dense.is_additive(Mods(None, scores.softcap(2.0)))


# ---- the report


@pytest.mark.parametrize("is_there", [True, False])
def test_it_says_when_nobody_watches_for_other_processes(monkeypatch, is_there):
    find = timing.importlib.util.find_spec
    monkeypatch.setattr(timing.importlib.util, "find_spec", lambda name, *more: find(name, *more) if is_there or name != "psutil" else None)
    code, out, _ = call("bench", "causal", "--seqlen", 40, "--pass", "forward", "--peer", "sdpa", *QUICK)
    assert code == 0 and ("Other processes were not watched for: pip install psutil." in out) == (not is_there)


def test_what_a_mod_captures_on_another_device_is_told_with_a_way_out(mods, monkeypatch):
    def elsewhere(*given):
        raise RuntimeError("indices should be either on cpu or on the same device")

    monkeypatch.setattr(bench, "native_options", elsewhere)
    code, _, err = call("bench", f"{mods}:near", *QUICK)
    assert code == BAD_ARGUMENTS and "what a mod captures must be on cpu: make it there, or name another --device" in err


def record(**timings: float) -> Record:
    made = Record("bench", "bench", "flex", "causal", "float32", "", flops=10**9)
    made.timings = {name: Timing((seconds,) * 3) for name, seconds in timings.items()}
    return made


def test_the_best_peer_is_the_fastest_that_did_the_same_job():
    found = record(anyattn=1.0, sdpa=2.0, flex=3.0, wrong=0.1, off=0.2)
    found.difference, found.budget = {"wrong": 0.5, "off": 0.0}, {"off": 2.0}
    assert bench_report.best_peer(found) == "sdpa" and found.ratio("sdpa") == 2.0
    assert bench_report.best_peer(record(anyattn=1.0)) is None


def test_a_case_that_anyattn_did_not_reach_is_not_right():
    assert bench_report.is_right(record(anyattn=1.0))
    assert not bench_report.is_right(record(sdpa=1.0))
    over = record(anyattn=1.0)
    over.budget = {OURS: 1.01}
    assert not bench_report.is_right(over)
