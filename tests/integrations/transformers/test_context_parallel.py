"""Models of Transformers over ranks: logits, losses and gradients of shards beside those of the whole batch, and errors of mistakes."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn import distributed as ad
from anyattn.distributed.batches import IGNORED
from anyattn.integrations.transformers import NAME
from tests.integrations.transformers import sharded_models
from tests.integrations.transformers.sharded_models import MISTAKES
from tests.support.covering import few
from tests.support.ranks import new_ranks, on_ranks
from tests.support.transformers_models import DEFINITION, Alone, Judge, by_module, decoder, packed, padded, tokens

LENGTHS = (37, 5, 41, 29)


def _packed() -> dict[str, Tensor]:
    batch = packed(LENGTHS)
    labels = batch["input_ids"].clone()
    labels[batch["position_ids"] == 0] = IGNORED  # as collators do, so that no text predicts the next
    return {**batch, "labels": labels}


def _padded(side: str) -> dict[str, Tensor]:
    ids, mask = tokens(2, 75), padded(2, 75, [75, 40], side)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def _whole(name: str, batch: dict[str, Tensor], dtype: torch.dtype, changes: dict[str, Any]) -> dict[str, Tensor]:
    """The same of the definition's attention, of each packed text alone."""
    model = decoder(name, dtype, **changes)
    model.set_attn_implementation(DEFINITION)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = (Alone(model, LENGTHS) if "position_ids" in batch else model)(**inputs, use_cache=False)[0]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)
    loss.backward()
    shown = logits.detach() if "attention_mask" not in batch else logits.detach()[batch["attention_mask"].bool()]
    return {**by_module(model, shown), "loss": loss.detach()[None]}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def check(name: str, ranks: int, batch: dict[str, Tensor], how: str = "active", **changes: Any) -> None:
    judge = Judge(lambda _, dtype: _whole(name, batch, dtype, changes))
    for rank, got in enumerate(on_ranks(ranks, sharded_models.losses, name, batch, how, changes)):
        judge.check(f"{NAME} rank {rank}", got)


@pytest.mark.parametrize("name", few(["llama", "mistral", "gemma2", "gemma3", "gpt_oss"], "gemma2", "gpt_oss"))
def test_packed_texts(name: str) -> None:
    check(name, 2, _packed())


@pytest.mark.parametrize(("name", "side"), [("llama", "right"), ("gemma2", "left")])
def test_padding(name: str, side: str) -> None:
    check(name, 2, _padded(side))


@pytest.mark.parametrize("way", few(["gpt_oss argument", "llama compiled", "gpt_oss checkpoint", "gpt_oss heads"], "llama compiled"))
def test_other_ways_to_call_a_model(way: str) -> None:
    name, how = way.split()
    check(name, 2, _packed(), how)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(mistake: Callable[..., Any]) -> None:
    name, wanted = MISTAKES[mistake]
    for message in on_ranks(2, sharded_models.message, mistake, name, _packed()):
        assert wanted in message


CAUSAL = torch.arange(9)[:, None] >= torch.arange(9)
NEAR = torch.arange(9)[:, None] - torch.arange(9) < 3


def _config(*kinds: str, **more: Any) -> Any:
    return SimpleNamespace(layer_types=list(kinds), sliding_window=3, **more)


def _texts(*ids: int) -> Tensor:
    return torch.tensor(ids)[:, None] == torch.tensor(ids)


TWO = _texts(0, 0, 0, 0, 1, 1, 1, 1, 1)
RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
BATCHES: dict[str, tuple[dict[str, Tensor], Tensor]] = {
    "one text": ({}, CAUSAL),
    "consecutive positions": ({"position_ids": torch.arange(5, 14)[None]}, CAUSAL),
    "positions": ({"position_ids": RESTARTING}, CAUSAL & TWO),
    "positions of each row": ({"position_ids": torch.cat((RESTARTING, torch.arange(9)[None]))}, torch.stack((CAUSAL & TWO, CAUSAL))),
    "padding": ({"attention_mask": PADDING}, CAUSAL & PADDING.bool()[:, None]),
    "a mask of ones leaves positions out": ({"attention_mask": torch.ones(1, 9), "position_ids": RESTARTING}, CAUSAL),
    "cumulative lengths": ({"cu_seq_lens_q": ENDS}, CAUSAL & TWO),
    "positions before lengths": ({"cu_seq_lens_q": torch.tensor([0, 9]), "position_ids": RESTARTING}, CAUSAL & TWO),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_masks_of_a_batch(batch: str) -> None:
    """Pair by pair, of both kinds of layers."""
    more, seen = BATCHES[batch]
    entries = 2 if any(t.shape[0] == 2 for name, t in more.items() if t.ndim == 2) else 1
    found = ad.transformers_masks(_config("sliding_attention", "full_attention"), {"input_ids": tokens(entries, 9), **more}, block_size=4)
    assert sorted(found) == ["full_attention", "sliding_attention"]
    b, q, k = torch.meshgrid(torch.arange(entries), torch.arange(9), torch.arange(9), indexing="ij")
    for kind, near in (("full_attention", True), ("sliding_attention", NEAR)):
        assert torch.equal(found[kind].mask_mod(b, 0, q, k).expand(entries, 9, 9), (seen & near).expand(entries, 9, 9)), kind
        assert pickle.loads(pickle.dumps(found[kind])).seq_lengths == (9, 9)


def test_kinds_of_layers() -> None:
    batch = {"input_ids": tokens(1, 9)}
    assert list(ad.transformers_masks(_config("full_attention"), batch)) == ["full_attention"]
    assert list(ad.transformers_masks(SimpleNamespace(sliding_window=3), batch)) == ["sliding_attention"]
    assert list(ad.transformers_masks(SimpleNamespace(sliding_window=3, use_sliding_window=False), batch)) == ["full_attention"]
    assert list(ad.transformers_masks(decoder("gemma2").config, batch)) == ["full_attention", "sliding_attention"]
    assert list(ad.transformers_masks(SimpleNamespace(), {"inputs_embeds": torch.zeros(1, 9, 4)})) == ["full_attention"]


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "other kinds": (_config("full_attention", "linear_attention"), {}, NotImplementedError, "has layers of linear_attention"),
    "chunks": (SimpleNamespace(attention_chunk_size=4), {}, NotImplementedError, "has layers of chunked_attention"),
    "no causality": (_config("full_attention", is_causal=False), {}, NotImplementedError, "not a causal decoder"),
    "no window": (SimpleNamespace(layer_types=["sliding_attention"]), {}, ValueError, "sliding_window=None; wanted a positive int"),
    "no rows": (_config("full_attention"), {"input_ids": None}, ValueError, "wanted input_ids"),
    "a dense mask": (_config("full_attention"), {"attention_mask": torch.ones(1, 1, 9, 9)}, ValueError, "attention_mask has shape"),
    "axes": (_config("full_attention"), {"position_ids": torch.zeros(3, 1, 9)}, ValueError, r"position_ids has shape \(3, 1, 9\)"),
    "short lengths": (
        _config("full_attention"),
        {"cu_seq_lens_q": torch.tensor([0, 4])},
        ValueError,
        "cu_seq_lens_q ends with 4; wanted 9",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_batches(case: str) -> None:
    config, more, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        ad.transformers_masks(config, {"input_ids": tokens(1, 9), **more})


def test_shards_of_a_batch() -> None:
    """On each of two ranks: rows, labels shifted before they are sharded, and what is left out and kept."""
    batch = {**_padded("right"), "input_ids": tokens(2, 75), "step": 7, "scale": torch.ones(2), "cu_seq_lens_q": None}
    shards = on_ranks(2, sharded_models.shards, batch)
    for name in ("input_ids", "position_ids", "shift_labels"):
        rows = torch.cat([shard[name] for shard, _ in shards], 1)
        order = torch.cat([positions for _, positions in shards])
        wanted = {"input_ids": batch["input_ids"], "position_ids": torch.arange(75)[None]}
        next_labels = torch.cat((batch["labels"][:, 1:], torch.full((2, 1), IGNORED)), 1)
        assert torch.equal(rows, wanted.get(name, next_labels)[:, order]), name
    for shard, _ in shards:
        assert int(shard["num_items_in_batch"]) == 74 + 39
        assert shard["use_cache"] is False and shard["step"] == 7 and torch.equal(shard["scale"], torch.ones(2))
        assert set(shard["labels"].flatten().tolist()) <= {IGNORED}
        assert "attention_mask" not in shard and "cu_seq_lens_q" not in shard


@pytest.mark.slow
def test_the_trainer_over_ranks(tmp_path: Path) -> None:
    """The recipe of docs/context-parallel.md: losses and norms of gradients are logged as by one process."""
    pytest.importorskip("accelerate")
    alone = sharded_models.trained(None, str(tmp_path), 0)
    ranks = new_ranks(2)
    try:
        logs = ranks.run(sharded_models.trained, str(tmp_path), free_port())
    finally:
        ranks.close()
    assert len(alone) == 4
    # logged with four digits or more
    assert [[f"{x:.3f}" for x in step] for step in logs[0]] == [[f"{x:.3f}" for x in step] for step in alone]
