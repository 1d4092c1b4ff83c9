"""Masks, scores and block masks travel: pickled, saved, copied and sent to other processes they are the same programs."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyattn
from anyattn import create_block_mask, masks, scores
from anyattn.call_cache import attention
from anyattn.mods.tracing.fingerprint import recognise
from anyattn.mods.tracing.trace import trace

IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
LENGTH = 8


def own_mask(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 == 0


def own_score(score, b, h, q_idx, kv_idx):
    return score - 0.25 * (q_idx - kv_idx).abs()


def with_width(width, b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < width


def with_aux(b, h, q_idx, kv_idx, aux_tensors):
    return aux_tensors[0][q_idx] == aux_tensors[0][kv_idx]


@anyattn.mod
def decorated(b, h, q_idx, kv_idx):
    return q_idx % 4 >= kv_idx % 4


LIBRARY: dict[str, Callable[[], Any]] = {
    "full": masks.full,
    "causal": masks.causal,
    "causal offset": lambda: masks.causal(offset=3),
    "causal offsets": lambda: masks.causal(offset=torch.tensor([1])),
    "causal_bottom_right": lambda: masks.causal_bottom_right(5, 8),
    "window": lambda: masks.sliding_window(2, right=1),
    "window unlimited": lambda: masks.sliding_window(None, -1),
    "window offsets": lambda: masks.sliding_window(2, 0, torch.tensor([1])),
    "prefix_lm": lambda: masks.prefix_lm(3),
    "prefix_lm per batch": lambda: masks.prefix_lm(torch.tensor([4])),
    "document": lambda: masks.document(IDS),
    "document of batch": lambda: masks.document(IDS[None]),
    "cu_seqlens": lambda: masks.document_from_cu_seqlens(torch.tensor([0, 3, 5, 8])),
    "chunked": lambda: masks.chunked(3),
    "dilated": lambda: masks.dilated(window=2, dilation=2),
    "left_padding": lambda: masks.left_padding(torch.tensor([2])),
    "sink_window": lambda: masks.sink_window(1, 2),
    "block_diagonal": lambda: masks.block_diagonal(3),
    "tree": lambda: masks.tree(torch.tensor([1, 3, 5, 7, 9, 11, 13, 15])),
    "block_diffusion": lambda: masks.block_diffusion(4, block=2),
    "neighborhood_3d": lambda: masks.neighborhood_3d((2, 2, 2), (1, 2, 1)),
    "sliding_tiles": lambda: masks.sliding_tiles((2, 2, 2), (1, 1, 2), window=[1, 2, 1]),
    "joined": lambda: masks.causal() & ~masks.document(IDS) | masks.sink_window(1, 2),
    "and_masks": lambda: anyattn.and_masks(masks.causal(), own_mask),
    "no masks": lambda: anyattn.or_masks(),
    "every mask": lambda: anyattn.and_masks(),
    "own": lambda: anyattn.mod(own_mask),
    "own named": lambda: anyattn.mods.algebra.Mask(anyattn.mod(own_mask), "mine"),
    "own and library": lambda: own_mask & masks.causal(),
    "own of a partial": lambda: anyattn.mod(functools.partial(with_width, 3)),
    "decorated": lambda: decorated,
    "not decorated": lambda: ~decorated,
    "alibi": lambda: scores.alibi(scores.alibi_slopes(2)),
    "alibi offset": lambda: scores.alibi(torch.ones(1, 2), 3),
    "alibi offsets": lambda: scores.alibi(torch.ones(2), torch.tensor([1])),
    "relative_bias": lambda: scores.relative_bias(torch.arange(10.0).reshape(2, 5)),
    "t5_bias": lambda: scores.t5_bias(torch.randn(8, 2), bidirectional=False, max_distance=20),
    "forget_gate": lambda: scores.forget_gate(torch.randn(1, 2, LENGTH)),
    "disentangled": lambda: scores.disentangled(*torch.randn(2, 1, 2, LENGTH, 6)),
    "disentangled buckets": lambda: scores.disentangled(*torch.randn(2, 1, 2, LENGTH, 8), max_distance=9, p2c_by_query=True),
    "head_bias": lambda: scores.head_bias(torch.tensor([1.0, 2.0])),
    "pair_bias": lambda: scores.pair_bias(torch.randn(1, 2, LENGTH, LENGTH)),
    "softcap": lambda: scores.softcap(3.0),
    "softcap that learns": lambda: scores.softcap(torch.tensor(3.0)),
    "temperature": lambda: scores.temperature(2),
    "chained": lambda: scores.temperature(2.0).then(scores.softcap(3.0)).then(own_score),
    "own score": lambda: anyattn.mod(own_score),
}


def saved_and_loaded(item: Any) -> Any:
    stream = io.BytesIO()
    torch.save(item, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS = {"pickle": lambda item: pickle.loads(pickle.dumps(item)), "torch": saved_and_loaded, "deepcopy": copy.deepcopy, "copy": copy.copy}


def call(mod: Any) -> torch.Tensor:
    """One attention under the mod."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, LENGTH, 8, generator=generator) for _ in range(3))
    return anyattn.flex_attention(q, k, v, **{"mask_mod" if mod.kind == "mask" else "score_mod": mod})


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LIBRARY)
def test_a_mod_that_was_away_is_the_same_program(name: str, way: str) -> None:
    mod = LIBRARY[name]()
    back = WAYS[way](mod)
    assert type(back) is type(mod) and back.name == mod.name and back.__name__ == mod.__name__
    assert trace(back, mod.kind).key == trace(mod, mod.kind).key
    assert trace(back, mod.kind).scalars == trace(mod, mod.kind).scalars
    before, after = recognise(mod), recognise(back)
    if before is not None and after is not None:
        assert after.pattern is before.pattern and after.numbers == before.numbers
        assert all(torch.equal(s, t) for s, t in zip(after.tensors, before.tensors, strict=True))
    assert (before is None) == (after is None)
    assert torch.equal(call(back), call(mod))


def test_a_mod_that_was_away_compiles_and_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.causal() & ~masks.sliding_window(2, 1) | own_mask
    want, back = call(mask), pickle.loads(pickle.dumps(mask))
    monkeypatch.setattr(anyattn.validate.flex, "flex_problem", None)  # what a call that is not remembered asks
    assert torch.equal(call(back), want)
    attention.clear()


def test_a_mod_with_aux_tensors_travels() -> None:
    mask = pickle.loads(pickle.dumps(anyattn.mod(with_aux)))
    assert mask.fn is with_aux


def test_what_a_copy_captures_is_copied_along() -> None:
    """As of everything else in a model: a deep copy learns for itself, and what was one tensor stays one."""
    bias = torch.nn.Parameter(torch.zeros(2))
    model = {"bias": bias, "score": scores.head_bias(bias)}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved_and_loaded(model)):
        assert other["bias"] is not bias and trace(other["score"], "score").tensors[0] is other["bias"]
        call(other["score"])[0, 1].sum().backward()
        assert other["bias"].grad is not None and bias.grad is None
    assert trace(copy.copy(model["score"]), "score").tensors[0] is bias


def closure(width: int) -> Callable:
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width


@pytest.mark.parametrize("way", ["pickle", "torch"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: anyattn.mod(closure(3)),
        lambda: masks.causal() & closure(3),
        lambda: ~anyattn.mod(closure(3)),
        lambda: anyattn.mod(functools.partial(closure(3))),
        lambda: create_block_mask(closure(3), 1, 1, 8, 8, "cpu", 4),
        lambda: create_block_mask(closure(3), 1, 1, 8, 8, "cpu", 4)[:, :, 1:],
        lambda: create_block_mask(anyattn.mod(closure(3)), 1, 1, 8, 8, "cpu", 4),
    ],
    ids=["mod", "joined", "inverted", "partial", "block mask", "slice", "block mask of a mod"],
)
def test_a_users_closure_is_refused_with_the_cure(make: Callable[[], Any], way: str) -> None:
    with pytest.raises(pickle.PicklingError, match=r"closure.*module's top level.*anyattn\.masks"):
        WAYS[way](make())


def test_a_users_closure_is_copied_as_functions_are() -> None:
    mod = anyattn.mod(closure(3))
    mask = create_block_mask(closure(3), 1, 1, 8, 8, "cpu", 4)
    for copied in (copy.copy, copy.deepcopy):
        assert copied(mod).fn is mod.fn and torch.equal(call(copied(mod)), call(mod))
        assert copied(mask).mask_mod is mask.mask_mod and copied(mask).is_exact
    assert copy.deepcopy(mask).kv_indices is not mask.kv_indices and copy.copy(mask).kv_indices is mask.kv_indices


BLOCK_MASKS: dict[str, Callable[[], anyattn.BlockMask]] = {
    "library": lambda: create_block_mask(masks.causal() & masks.document(IDS), 1, 1, 8, 8, "cpu", 2),
    "a function": lambda: create_block_mask(own_mask, 2, 2, 8, 8, "cpu", 2),
    "rows": lambda: create_block_mask(masks.causal(), 1, 1, 8, 8, "cpu", 2)[:, :, 1:],
    "chosen rows": lambda: create_block_mask(masks.causal(), 1, 1, 8, 8, "cpu", 2)[:, :, [0, 3, 1]],
    "every other row": lambda: create_block_mask(own_mask, 1, 1, 8, 8, "cpu", 2)[:, :, ::2],
    "heads": lambda: create_block_mask(masks.causal(), 2, 4, 8, 8, "cpu", 2)[1, 1:],
    "crop": lambda: create_block_mask(masks.causal(), 1, 1, 8, 8, "cpu", 2)._adjust(5, 7),
    "no mask": lambda: anyattn.BlockMask.from_kv_blocks(torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32)),
}


def same_block_mask(back: anyattn.BlockMask, mask: anyattn.BlockMask) -> None:
    assert type(back) is type(mask) and back.shape == mask.shape and back.is_exact is mask.is_exact
    assert back._tensors().keys() == mask._tensors().keys()
    assert all(torch.equal(t, mask._tensors()[n]) for n, t in back._tensors().items())
    places = [torch.arange(n).reshape([-1 if i == at else 1 for i in range(4)]) for at, n in enumerate((1, 1, *mask.seq_lengths))]
    assert torch.equal(torch.as_tensor(back.mask_mod(*places)), torch.as_tensor(mask.mask_mod(*places)))
    assert trace(back.mask_mod, "mask").key == trace(mask.mask_mod, "mask").key


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_a_block_mask_travels(name: str, way: str) -> None:
    mask = BLOCK_MASKS[name]()
    back = WAYS[way](mask)
    same_block_mask(back, mask)
    back.kv_indices = back.kv_indices.clone()
    assert not back.is_exact, "what is assigned later is another mask"


def test_weights_only_loading_needs_no_more_than_the_names() -> None:
    """What ``torch.load``'s default refuses, it takes once the functions are named to it."""
    stream = io.BytesIO()
    torch.save({"mask": masks.causal(offset=2), "blocks": create_block_mask(masks.document(IDS), 1, 1, 8, 8, "cpu", 2)}, stream)
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=r"anyattn\.mods\.masks\.causal"):
        torch.load(stream, weights_only=True)
    stream.seek(0)
    with torch.serialization.safe_globals([masks.causal, masks.document, anyattn.BlockMask]):
        back = torch.load(stream, weights_only=True)
    assert back["mask"].name == "causal(offset=2)" and back["blocks"].is_exact


class Batches(torch.utils.data.Dataset):
    """Its items are what a worker makes and sends; its masks are what a worker is sent."""

    def __init__(self) -> None:
        self.mask = masks.causal() & masks.document(IDS) & own_mask

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: int) -> tuple[Any, Any, Any]:
        mask = self.mask if at else masks.document(IDS + at)
        return mask, create_block_mask(mask, 1, 1, 8, 8, "cpu", 2), scores.head_bias(torch.tensor([1.0, 2.0]))


def first(items: list) -> Any:
    return items[0]


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_data_loader_workers_take_and_send_them(start: str) -> None:
    batches = Batches()
    loader = torch.utils.data.DataLoader(batches, collate_fn=first, num_workers=1, multiprocessing_context=start)
    for at, (mask, blocks, score) in enumerate(loader):
        wanted = batches[at]
        assert trace(mask, "mask").key == trace(wanted[0], "mask").key and torch.equal(call(mask), call(wanted[0]))
        same_block_mask(blocks, wanted[1])
        assert torch.equal(call(score), call(wanted[2]))
