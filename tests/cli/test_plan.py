"""``anyattn plan``: its table is the planner's, it draws who owns what, and a mistake ends in one line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from anyattn.cli import BAD_ARGUMENTS, pictures
from anyattn.cli.plan import Case, planned
from anyattn.mods import masks
from tests.support.command_line import call


def test_the_table_and_the_owners_of_causal_attention() -> None:
    code, out, _ = call("plan", "causal", "--S", "4k", "--ranks", "2,4")
    assert code == 0 and "4096 positions" in out
    rows = [line.split() for line in out.splitlines() if re.match(r" +[24]  ", line)]
    assert [row[:6] for row in rows] == [["2", "fold", "1.000", "0.750", "0.750", "2048"], ["4", "fold", "1.000", "0.750", "0.750", "3072"]]
    lines = out.splitlines()
    assert lines[lines.index("2 ranks") + 1] == "0" * 8 + "1" * 16 + "0" * 8
    assert lines[lines.index("4 ranks") + 1] == "".join(rank * 4 for rank in "01233210")


def test_heads_travel_where_that_is_expected_to_take_less_time() -> None:
    rows = {}
    for transport in ("auto", "keys", "heads"):
        code, out, _ = call("plan", "causal", "--S", "64k", "--heads", "16,16", "--ranks", "2,8", "--transport", transport)
        assert code == 0
        rows[transport] = [line.split()[1] for line in out.splitlines() if re.match(r" +[28]  ", line)]
    assert rows == {"auto": ["fold", "heads"], "keys": ["fold", "fold"], "heads": ["heads", "heads"]}


def test_nodes_receive_keys_once() -> None:
    shares = {}
    for size in (None, 2, 16):
        code, out, _ = call("plan", "causal", "--S", "4k", "--ranks", "16", *(() if size is None else ("--node-size", size)))
        (row,) = [line.split() for line in out.splitlines() if re.match(r" +16  ", line)]
        assert code == 0
        shares[size] = float(row[6])
    ((placement, _),) = planned(Case(masks.causal(), 4096), (16,))
    assert placement.stats.node_size == 8 and shares[None] == round(placement.stats.across_share, 3)
    assert 0 == shares[16] < shares[None] < shares[2]
    ((alone, _),) = planned(Case(masks.causal(), 4096), (13,))
    assert alone.stats.node_size == 13


def test_a_score_without_a_mask_is_planned_as_every_key_for_every_row() -> None:
    code, out, _ = call("plan", "softcap(20.0)", "--S", 2048, "--ranks", 3)
    assert code == 0 and "every row sees every key" in out and re.search(r"3  contiguous +1\.\d+ +1\.000 +1\.000", out), out


def test_a_mask_by_head_is_counted_for_all_heads() -> None:
    """Head 0 sees its own key alone, so that counting it alone would let nothing travel."""
    case = Case(lambda b, h, q, k: (q >= k) & (q - k <= 512 * h), 4096, (4, 1))
    ((placement, work),) = planned(case, (4,))
    assert case.differs_by_head and not Case(masks.causal(), 64).differs_by_head
    reach = [-(-512 * h // work.chunk) for h in range(4)]
    assert np.array_equal(work.needs, np.tri(work.chunks, dtype=bool) & ~np.tri(work.chunks, k=-max(reach) - 1, dtype=bool))
    assert placement.stats.received_share > 0


@pytest.mark.parametrize(("length", "heads", "block"), [(4096, 16, 128), (2**18, 16, 128), (2**20, 16, 256), (2**24, 16, 4096)])
def test_blocks_of_long_sequences(length: int, heads: int, block: int) -> None:
    assert Case(masks.causal(), length, (heads, 4)).block == block
    by_head = Case(lambda b, h, q, k: q >= k + h, length, (heads, 4)).block
    assert by_head >= block and heads * (length // by_head) ** 2 <= 2**24


def test_a_picture_of_the_owners(tmp_path: Path) -> None:
    paths = [tmp_path / "owners.svg", tmp_path / "owners.png"]
    code, out, _ = call("plan", "document", "--S", 4096, "--ranks", "2,13", *(word for path in paths for word in ("--out", path)))
    assert code == 0 and "wrote" in out
    assert paths[0].read_bytes().startswith(b"<?xml") and paths[1].read_bytes().startswith(b"\x89PNG")


def test_what_rows_see_is_drawn_in_their_ranks_colour() -> None:
    owner, needs = np.array([1, 0, 0]), np.tri(3, dtype=bool)
    (axes,) = pictures.figure([pictures.OwnerPanel("Causal", owner, needs, 16)]).axes
    pixels = np.asarray(axes.images[0].get_array())
    assert len({tuple(pixels[place]) for place in ((0, 0), (1, 0), (0, 1))}) == 3  # rank 1, rank 0, hidden
    assert (pixels[1, 0] == pixels[2, 2]).all() and (pixels[0, 1] == pixels[1, 2]).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["nonsense"]),
        (["causal", "--S", "0"], ["'0'", "256k"]),
        (["causal", "--S", "65M"], ["65M", "64M"]),
        (["causal", "--S", "4.5k"], ["4.5k"]),
        (["causal", "--ranks", "8,0"], ["8,0", "1 to 1024"]),
        (["causal", "--ranks", "2048"], ["2048", "1 to 1024"]),
        (["causal", "--ranks", "12", "--node-size", "8"], ["--node-size 8", "12 ranks"]),
        (["causal", "--heads", "16"], ["'16'", "2 numbers"]),
        (["causal", "--ranks", "3", "--transport", "heads"], ["heads=(16, 4)", "3 ranks"]),
        (["causal", "--out", "owners.pdf"], ["owners.pdf", ".svg"]),
        (["own", "--S", "1M"], ["ranges", "--seqlen 65536"]),
    ],
    ids=lambda given: " ".join(given),
)
def test_a_mistake_ends_in_one_line(arguments: list[str], words: list[str]) -> None:
    code, out, err = call("plan", *arguments)
    assert code == BAD_ARGUMENTS and not out, err
    assert len(err.strip().splitlines()) == 1 and all(word in err for word in words), err
