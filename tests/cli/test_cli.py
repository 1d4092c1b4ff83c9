"""The command line as a person meets it: what it prints, its exit codes, and one clear line for every mistake."""

from __future__ import annotations

import pytest
import torch

from anyattn import gallery
from anyattn.cli import BAD_ARGUMENTS, INTERRUPTED
from tests.support.command_line import call

PNG, SVG = b"\x89PNG", b"<?xml"


@pytest.fixture
def mods(tmp_path):
    path = tmp_path / "mods.py"
    path.write_text(
        "def near(b, h, q_idx, kv_idx):\n    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)\n\n"
        "def halved(score, b, h, q_idx, kv_idx):\n    return score * 0.5\n\n"
        "def branching(b, h, q_idx, kv_idx):\n    return True if q_idx > kv_idx else False\n\n"
        "def short(b, h):\n    return b\n\n"
        "def raising(b, h, q_idx, kv_idx):\n    raise LookupError('no such document')\n\n"
        "def missing(b, h, q_idx, kv_idx):\n    return q_idx >= {'a': 1}['width']\n\n"
        "def failing(score, b, h, q_idx, kv_idx):\n    return score / (1 // 0)\n\n"
        "calls = []\n"
        "def late(b, h, q_idx, kv_idx):\n    calls.append(1)\n    assert len(calls) < 2, 'called again'\n    return q_idx >= kv_idx\n"
    )
    return path


def test_demo_judges_every_variant_it_ran_and_draws_the_masks(tmp_path):
    code, out, _ = call("demo", "--seqlen", 128, "--heads", 2, "--head-dim", 16, "--rounds", 1, "--out", tmp_path)
    assert code == 0
    for variant in gallery.VARIANTS.values():
        assert variant.title in out
    assert (tmp_path / "gallery.png").read_bytes().startswith(PNG) and (tmp_path / "gallery.svg").read_bytes().startswith(SVG)


def test_demo_fails_when_a_result_is_over_its_budget(tmp_path, monkeypatch):
    from anyattn.cli import demo

    monkeypatch.setattr(demo, "shares", lambda *a: {"out": 1.5})
    code, out, _ = call("demo", "--seqlen", 64, "--heads", 1, "--rounds", 1, "--only", "causal", "--out", tmp_path)
    assert code == 1 and "150%" in out


def test_show_counts_the_tiles_of_a_library_mask():
    code, out, _ = call("show", "causal", "--seqlen", 512, "--block", 128)
    assert code == 0 and "██▒▒" in out


def test_show_draws_a_mask_from_a_file(mods, tmp_path):
    picture = tmp_path / "near.svg"
    code, out, _ = call("show", f"{mods}:near", "--seqlen", 256, "--block", 64, "--out", picture)
    assert code == 0 and "near" in out and picture.read_bytes().startswith(SVG)


def test_explain_says_what_a_mask_and_a_score_mod_are(mods):
    code, mask, _ = call("explain", f"{mods}:near")
    assert code == 0 and "ranges" in mask and "q - kv" in mask and "backend torch" in mask
    code, score, _ = call("explain", f"{mods}:halved")
    assert code == 0 and "score_mod" in score and "mul" in score


def test_doctor_checks_results_and_names_the_backends():
    code, out, _ = call("doctor")
    assert code == 0 and torch.__version__.split("+")[0] in out and "torch" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nonsense"], ["nonsense"]),
        (["show", "missing.py:f"], ["missing.py"]),
        (["show", "{mods}:absent"], ["absent"]),
        (["show", "{mods}:short"], ["short", "arguments"]),
        (["explain", "{mods}:branching"], ["torch.where"]),
        (["show", "causal", "--seqlen", "0"], ["--seqlen", "0"]),
        (["demo", "--only", "nonsense"], ["nonsense"]),
        (["nonsense"], ["nonsense"]),
    ],
)
def test_a_mistake_ends_in_one_line(arguments, words, mods):
    code, _, err = call(*(a.format(mods=mods) for a in arguments))
    assert code == BAD_ARGUMENTS, err
    assert len(err.strip().splitlines()) == 1 and all(word in err for word in words), err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "causal", "--seqlen", 999999999], ["--seqlen", "999999999"]),
        (["show", "causal", "--seqlen-k", 999999999], ["--seqlen-k", "999999999"]),
        (["show", "causal", "--seqlen", 2**21], ["tiles of 128", "--block, 512"]),
        (["show", "causal", "--seqlen", 8192, "--block", 1], ["tiles of 1", "--block, 2"]),
        (["show", "own", "--seqlen", 2**21, "--block", 2**20], ["ranges", "--seqlen 65536"]),
        (["show", "causal", "--block", 10**12], ["--block"]),
        (["show", "causal", "--head", 10**9], ["--head"]),
        (["show", "causal", "--batch", 10**9], ["--batch"]),
        (["show", "~" * 20_000 + "causal"], ["wanted"]),
        (["explain", "document", "--seqlen", 999999999], ["--seqlen", "999999999"]),
        (["explain", "t5_bias", "--heads", 10**9], ["--heads"]),
        (["explain", "causal", "--head-dim", 10**9], ["--head-dim"]),
        (["demo", "--seqlen", 999999999], ["--seqlen", "999999999"]),
        (["demo", "--seqlen", 16384, "--heads", 1024], ["GiB", "--heads 1024"]),
        (["demo", "--heads", 10**9], ["--heads"]),
        (["demo", "--head-dim", 10**9], ["--head-dim"]),
        (["demo", "--seqlen", 8192, "--block", 1], ["tiles of 1"]),
        (["demo", "--rounds", 10**9], ["--rounds"]),
    ],
    ids=lambda given: " ".join(map(str, given))[:40],
)
def test_sizes_that_would_take_for_ever_are_refused_at_once(arguments, words):
    code, out, err = call(*arguments)
    assert code == BAD_ARGUMENTS and not out, err
    assert len(err.strip().splitlines()) == 1 and all(word in err for word in words), err


def test_show_draws_one_head_of_many(tmp_path):
    """The others are not looked at: of 4096 heads and 65,537 batch entries the lists would not fit."""
    path = tmp_path / "mods.py"
    path.write_text("def per_head(b, h, q_idx, kv_idx):\n    return (q_idx - kv_idx) * 64 < (h % 2) * 64 * 64 + b\n")
    shown = [call("show", f"{path}:per_head", "--seqlen", 256, "--block", 64, "--head", head, "--batch", 2**16) for head in (0, 1, 4095)]
    assert [code for code, _, _ in shown] == [0, 0, 0]
    drawn = [out.partition("\n")[2] for _, out, _ in shown]
    assert drawn[0] == drawn[1] == drawn[2] and "partial 0" in drawn[0]
    few = [call("show", f"{path}:per_head", "--seqlen", 256, "--block", 64, "--head", head)[1].partition("\n")[2] for head in (0, 1, 4095)]
    assert few[0] != few[1] == few[2]


@pytest.mark.parametrize(
    ("command", "name", "line"),
    [
        ("show", "raising", "raise LookupError('no such document')"),
        ("show", "missing", "{'a': 1}['width']"),
        ("show", "late", "assert len(calls) < 2"),
        ("explain", "failing", "1 // 0"),
        ("explain", "late", "assert len(calls) < 2"),
    ],
)
def test_what_a_users_mod_raises_ends_in_the_users_line(command, name, line, mods):
    code, _, err = call(command, f"{mods}:{name}")
    assert code == BAD_ARGUMENTS, err
    said = err.strip().splitlines()
    assert len(said) == 1 and "mods.py:" in said[0] and line in said[0], err


def test_what_importing_a_users_file_raises_ends_in_the_users_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("width = 3\nnear = {}['near']\n")
    code, _, err = call("show", f"{path}:near")
    assert code == BAD_ARGUMENTS and "KeyError" in err and "broken.py:2" in err and "{}['near']" in err, err


def test_ctrl_c_ends_in_one_line(monkeypatch):
    from anyattn.cli import doctor

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_worst", interrupted)
    code, _, err = call("doctor")
    assert code == INTERRUPTED and len(err.strip().splitlines()) == 1


def test_the_gallery_holds_what_it_promises():
    titles = [v.title for v in gallery.VARIANTS.values()]
    assert len(titles) == len(set(titles)) == 15
    for variant in gallery.VARIANTS.values():
        mods = variant.mods(gallery.Setting(96, 4))
        assert mods.mask is not None or mods.score is not None


@pytest.mark.parametrize(("ending", "status"), [("3", 3), ("0", BAD_ARGUMENTS), ("", BAD_ARGUMENTS), ("'told'", 1)])
@pytest.mark.parametrize("place", ["file", "mask"])
def test_a_file_that_ends_the_program_does_not_look_like_success(place, ending, status, tmp_path):
    """The file's own status, unless that says that all went well."""
    path, raised = tmp_path / "ending.py", f"raise SystemExit({ending})"
    path.write_text(f"def near(b, h, q_idx, kv_idx):\n    {raised if place == 'mask' else 'return q_idx >= kv_idx'}\n")
    if place == "file":
        path.write_text(path.read_text() + raised)
    for command in ("explain", "show"):
        code, out, err = call(command, f"{path}:near")
        assert code == status and not out and len(err.strip().splitlines()) == 1 and "SystemExit" in err and "__main__" in err, err
