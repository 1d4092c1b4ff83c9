"""An index may leave its captured tensor where no mask shows the pair: brute force over all pairs says what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.call_cache import attention
from anyattn.mods.analysis import visible_loads
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.load_bounds import check_loads, check_loads_ragged
from anyattn.mods.analysis.visible_loads import Dense, Listed, Ragged, check_call, held
from anyattn.mods.tracing.trace import trace
from anyattn.validate import sequences
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments, cache_call
from tests.support.no_reading import Waited, no_reading

B, H, M, N = 2, 2, 40, 56
FLAGS = torch.arange(200) % 3 != 0
IDS = torch.arange(64) // 10


@pytest.fixture(autouse=True)
def _forgotten():
    attention.clear()
    yield
    attention.clear()


def at_all_pairs(mod, seqlen_q=M, seqlen_k=N):
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
    return evaluate(mod, b, h, torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)).expand(B, H, seqlen_q, seqlen_k)


INDICES = {
    "distance": lambda by: lambda b, h, q, k: q - k + by,
    "row": lambda by: lambda b, h, q, k: q + by + h,
    "key": lambda by: lambda b, h, q, k: k - by,
    "product": lambda by: lambda b, h, q, k: (q * k) // 3 - by,
    "by a table": lambda by: lambda b, h, q, k: IDS[k] * 3 - q + by,
}
MASKS = {
    "window": lambda n: lambda b, h, q, k: (q >= k) & (q - k <= n),
    "documents": lambda n: lambda b, h, q, k: IDS[q] == IDS[k],
    "few rows": lambda n: lambda b, h, q, k: (q < n) & (k < 2 * n + b),
    "odd": lambda n: lambda b, h, q, k: (q * 7 + k * 5) % 4 == 0,
    "small product": lambda n: lambda b, h, q, k: q * k < 3 * n,
}


def random_case(rng):
    index = INDICES[rng.choice(list(INDICES))](rng.randint(-5, 20))
    anything, size = MASKS[rng.choice(list(MASKS))](rng.randint(0, 30)), rng.choice([3, 17, 40, 64, 150])
    most = size - rng.choice([0, 1, 1])  # now and then one too many
    guarded = lambda b, h, q, k: anything(b, h, q, k) & (index(b, h, q, k) <= most) & (index(b, h, q, k) >= -size)
    return index, rng.choice([anything, guarded]), size


def outside(index, size):
    """Of all pairs, where the index leaves a tensor of this size."""
    return at_all_pairs(trace(lambda b, h, q, k: (index(b, h, q, k) >= size) | (index(b, h, q, k) < -size), "mask"))


def random_mods(rng):
    """A mask, a bias that reads a table, by which index, and the table."""
    index, shows, size = random_case(rng)
    table = torch.randn(size)
    return trace(shows, "mask"), trace(lambda s, b, h, q, k: s + table[index(b, h, q, k)], "score"), index, table


@pytest.mark.parametrize("seed", range(60))
def test_refused_is_what_a_seen_pair_reads_outside(seed):
    mask, score, index, table = random_mods(random.Random(seed))
    seen, size = at_all_pairs(mask), len(table)
    if bool((seen & outside(index, size)).any()):
        with pytest.raises(ValueError, match=r"score_mod .* reads dimension 0 of a captured tensor"):
            check_call(Dense(B, H, M, N), [mask], [score])
        return
    (found,) = check_call(Dense(B, H, M, N), [mask], [score])[1]
    check_loads(found, B, H, M, N)  # inside at hidden pairs too: no backend can read outside
    wide = torch.nn.functional.pad(table, (5000, 5000))  # whatever the index, and negative ones wrapped by hand
    wrapped = lambda b, h, q, k: index(b, h, q, k) + torch.where(index(b, h, q, k) < 0, size, 0)
    unhindered = trace(lambda s, b, h, q, k: s + wide[5000 + wrapped(b, h, q, k)], "score")
    leaves = (torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1), torch.arange(M)[:, None], torch.arange(N), torch.zeros(()))
    assert torch.equal(evaluate(found, *leaves) * seen, evaluate(unhindered, *leaves) * seen)


@pytest.mark.parametrize("seed", range(60))
def test_a_mask_may_hide_what_it_reads_outside_itself(seed):
    """Its own load counts where the mask could show the pair, whatever the load returned."""
    rng = random.Random(seed)
    index, shows, size = random_case(rng)
    flags = FLAGS[:size]

    def mask(b, h, q, k):
        read, shown = flags[index(b, h, q, k)], shows(b, h, q, k)
        return [shown & read, ~(~shown | read), torch.where(shown, read, False), shown & (read | (q == k)), shown & (~read ^ (k > 3))][form]

    for form in range(5):  # noqa: B007
        traced = trace(mask, "mask")
        if bool((at_all_pairs(trace(shows, "mask")) & outside(index, size)).any()):
            with pytest.raises(ValueError, match=r"mask_mod .* reads dimension 0 of a captured tensor"):
                check_call(Dense(B, H, M, N), [traced])
        else:
            ((found,), _) = check_call(Dense(B, H, M, N), [traced])
            check_loads(found, B, H, M, N)
            assert not bool((at_all_pairs(found) & ~at_all_pairs(trace(shows, "mask"))).any())


def test_a_mask_that_shows_what_it_reads_outside_is_refused():
    table = torch.zeros(8, dtype=torch.bool)
    for mask in (
        lambda b, h, q, k: ~table[q - k],
        lambda b, h, q, k: (q >= k) | table[k],
        lambda b, h, q, k: torch.where(table[k], q >= k, q < 3),
        lambda b, h, q, k: (q - k < 8) & (table[q - k] == (q < k)),
    ):
        with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
            check_call(Dense(1, 1, 20, 20), [trace(mask, "mask")])


def test_two_masks_cannot_hide_each_other_by_what_they_read_outside():
    table = torch.zeros(8, dtype=torch.bool)
    pair = [trace(lambda b, h, q, k: table[k], "mask"), trace(lambda b, h, q, k: table[k] & (q >= 0), "mask")]
    with pytest.raises(ValueError, match="index 8 "):
        check_call(Dense(1, 1, 20, 20), pair)
    check_call(Dense(1, 1, 20, 20), [*pair, trace(lambda b, h, q, k: k < 8, "mask")])


@pytest.mark.parametrize("seed", range(40))
def test_lists_hide_the_tiles_that_they_leave_out(seed):
    """In a full tile the first mask is not asked, so that it hides nothing there."""
    rng = random.Random(seed)
    mask, score, index, table = random_mods(rng)
    size, tile = len(table), (16, 8)
    g = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 3, (rng.choice([1, B]), rng.choice([1, H]), 3, 7), generator=g).to(torch.uint8)
    if seed % 2:  # so that some are accepted
        first = outside(index, size).unflatten(-1, (7, 8))
        bad = torch.nn.functional.pad(first, (0, 0, 0, 0, 0, 8)).unflatten(2, (3, 16)).any(-1).any(3).any(0, True).any(1, True)
        classes = torch.where(bad, 0, classes).to(torch.uint8)
    by_pair = classes.repeat_interleave(16, 2)[:, :, :M].repeat_interleave(8, 3)[..., :N]
    seen = ((by_pair == 1) & at_all_pairs(mask)) | (by_pair == 2)
    call = lambda: check_call(Dense(B, H, M, N), [mask], [score], lambda: Listed(classes, tile))
    if bool((seen & outside(index, size)).any()):
        with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
            call()
    else:
        check_loads(call()[1][0], B, H, M, N)


@pytest.mark.parametrize("seed", range(20))
def test_ragged_batches(seed):
    rng = random.Random(seed)
    mask, score, index, table = random_mods(rng)
    lengths_q, lengths_k = ([rng.choice([0, 1, 17, M]) for _ in range(B)] for _ in range(2))
    inside = torch.zeros(B, 1, M, M, dtype=torch.bool)
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        inside[b, :, :n, :m] = True
    bad = inside & (at_all_pairs(mask) & outside(index, len(table)))[..., :M]
    pairs = Ragged(H, torch.tensor(lengths_q), torch.tensor(lengths_k), torch.zeros(B, dtype=torch.int64))
    if bool(bad.any()):
        with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
            check_call(pairs, [mask], [score])
    else:
        check_loads_ragged(check_call(pairs, [mask], [score])[1][0], H, pairs.seqlens_q, pairs.seqlens_k)


def test_without_values_a_mask_of_captured_ones_hides_nothing():
    table = torch.zeros(8)
    score_like = lambda shows: trace(lambda b, h, q, k: shows(b, h, q, k) & (table[k] == 0), "mask")
    plain, by_ids = score_like(lambda b, h, q, k: k < 8), score_like(lambda b, h, q, k: (IDS[k] == 0) & (k < 12))
    check_call(Dense(1, 1, 20, 20), [plain], reads_values=False)
    with pytest.raises(ValueError, match="index 8 "):
        check_call(Dense(1, 1, 20, 20), [by_ids], reads_values=False)


def test_held_clamps_what_is_not_plainly_inside():
    table = torch.zeros(8)
    mod = trace(lambda s, b, h, q, k: s + table[k] + table[torch.clamp(q, 0, 7)] + table[IDS[q]], "score")
    found = held(mod, 1, 1, 20, 20)
    assert [n.op for n in found.expr.nodes].count("max") == 3  # the user's clamp is one
    check_loads(found, 1, 1, 20, 20)


def step(score, lengths, **options):
    """The checked score mod of a step of decoding whose tables are not read, as on a GPU: one query, a cache of 300 rows."""
    q, cache = torch.zeros(2, 1, 4, 16), torch.zeros(2, 300, 2, 16)
    with mock.patch.object(sequences, "skips_device_reads", lambda device, validate: True):
        found = cache_call(CacheArguments(q, cache, cache, cache_seqlens=torch.tensor(lengths)), Options(score_mod=score, **options))
    return found.problem.score


def clamps(mod):
    return [n.op for n in mod.expr.nodes].count("max")


@pytest.mark.parametrize("reads_captured", [False, True])
def test_a_step_counts_positions_to_the_capacity(reads_captured):
    """A query's position is its place in the cache: the row after 299 others reads entry 299, though there is but one query."""
    short, long = torch.zeros(100), torch.zeros(300)
    assert clamps(step(lambda s, b, h, i, j: s + long[i], [300, 40], reads_captured=reads_captured)) == 0
    if not reads_captured:
        assert clamps(step(lambda s, b, h, i, j: s + short[i], [300, 40], reads_captured=False)) == 1
        return
    assert clamps(step(lambda s, b, h, i, j: s + short[i], [100, 40])) == 0, "by the lengths, which are read for this"
    with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
        step(lambda s, b, h, i, j: s + short[i], [101, 40])


def test_a_step_clamps_what_is_read_from_a_tensor():
    table, places, far = torch.zeros(8), torch.zeros(300, dtype=torch.int64), torch.full((300,), 10**6)
    for given in (places, far):
        assert clamps(step(lambda s, b, h, i, j, given=given: s + table[given[j]], [300, 40])) == 1


# ---- calls

TABLE = torch.randn(128, generator=torch.Generator().manual_seed(0))
Q, K, V = torch.randn(3, 1, 2, 300, 16, generator=torch.Generator().manual_seed(1))


def by_hand(s, b, h, i, j):
    return s + TABLE[torch.clamp(i - j, -128, 127)]


def test_a_relative_bias_beyond_a_window_in_every_call():
    window, score = masks.sliding_window(127, 0), lambda s, b, h, i, j: s + TABLE[i - j]
    listed = anyattn.create_block_mask(window, 1, 1, 300, 300, "cpu", 64)
    edited = anyattn.BlockMask.from_kv_blocks(
        listed.kv_num_blocks, listed.kv_indices, listed.full_kv_num_blocks, listed.full_kv_indices, 64, window, (300, 300)
    )
    wrapped, wrapped_by_hand = anyattn.mod(score), anyattn.mod(by_hand)
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))
    packed, ends = [t[0] for t in (q, k, v)], torch.tensor([0, 100, 300])
    compiled = torch.compile(lambda mod: anyattn.flex_attention(Q, K, V, score_mod=mod, mask_mod=window), backend="eager", fullgraph=True)
    for call in (
        lambda mod: anyattn.flex_attention(Q, K, V, score_mod=mod, mask_mod=window),
        lambda mod: anyattn.flex_attention(Q, K, V, score_mod=mod, block_mask=listed),
        lambda mod: anyattn.flex_attention(Q, K, V, score_mod=mod, block_mask=edited),
        lambda mod: anyattn.flash_attn_func(q, k, v, score_mod=mod, causal=True, window_size=(127, 0), softcap=9.0),
        lambda mod: anyattn.flash_attn_varlen_func(
            *packed, cu_seqlens_q=ends, cu_seqlens_k=ends, score_mod=mod, causal=True, window_size=(127, 0)
        ),
        lambda mod: anyattn.flash_attn_with_kvcache(q[:, -2:], k, v, score_mod=mod, window_size=(127, 0)),
        lambda mod: compiled(wrapped if mod is score else wrapped_by_hand),
    ):
        for _ in range(2):
            assert torch.equal(call(score), call(by_hand))


def test_gradients_of_a_table_that_hidden_pairs_leave():
    table = TABLE.clone().requires_grad_()
    grads = []
    for index in (lambda i, j: i - j, lambda i, j: torch.clamp(i - j, -128, 127)):
        tensors = [t.clone().requires_grad_() for t in (Q, K, V)]
        out = anyattn.flex_attention(
            *tensors, score_mod=lambda s, b, h, i, j, index=index: s + table[index(i, j)], mask_mod=masks.sliding_window(127, 0)
        )
        grads.append(torch.autograd.grad(out.square().sum(), [*tensors, table]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_what_hides_a_pair_is_asked_again_on_every_call():
    """A mask's ids and a block mask's lists may change between two calls of the same facts."""
    ids = torch.arange(300) // 100
    score = lambda s, b, h, i, j: s + TABLE[i - j]
    documents = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    for _ in range(3):
        anyattn.flex_attention(Q, K, V, score_mod=score, mask_mod=documents)
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))
    for _ in range(3):
        anyattn.flash_attn_func(q, k, v, score_mod=score, mask_mod=documents)
    ids.zero_()
    with pytest.raises(ValueError, match="index 128 "):
        anyattn.flex_attention(Q, K, V, score_mod=score, mask_mod=documents)
    with pytest.raises(ValueError, match="index 128 "):
        anyattn.flash_attn_func(q, k, v, score_mod=score, mask_mod=documents)


def test_a_window_that_hides_is_remembered_and_a_wider_one_refused():
    calls = lambda left: anyattn.flex_attention(
        Q, K, V, score_mod=lambda s, b, h, i, j: s + TABLE[i - j], mask_mod=masks.sliding_window(left, 0)
    )
    calls(127), calls(127)
    assert attention.size() == 1
    with pytest.raises(ValueError, match="index 128 "):
        calls(128)


def test_the_pages_of_torchs_paged_attention():
    """Pages that no sequence has stand for keys before the first: a bias that is read there is hidden by mask and lists."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask

    page, length = 16, 64
    causal = lambda b, h, i, j: i >= j
    bias = torch.randn(2 * length - 1)
    score = lambda s, b, h, i, j: s + bias[i - j + length - 1]
    pool = PagedAttention(12, page, 2, device="cpu")
    q, k, v = torch.randn(3, 2, 2, length, 16, generator=torch.Generator().manual_seed(2))
    for entry in (1, 0):
        pool.reserve(torch.tensor(entry), torch.tensor(length))
    stored = [torch.zeros(1, 2, 12 * page, 16) for _ in range(2)]
    places = torch.arange(length).expand(2, length)
    pool.assign(torch.arange(2), places, k, v, *stored)
    made = create_block_mask(causal, 2, 1, length, length, "cpu", BLOCK_SIZE=page)
    paged = pool.convert_logical_block_mask(made)
    out = anyattn.flex_attention(q, *stored, score_mod=pool.get_score_mod(score), block_mask=paged)
    wanted = anyattn.flex_attention(q, k, v, score_mod=score, mask_mod=causal)
    assert float((out - wanted).abs().max()) <= 32 * torch.finfo(out.dtype).eps * float(v.abs().max())


def test_tensors_of_all_sizes_have_one_program():
    """A clamp's limits are numbers of the mod, beside its own."""

    def flags(size: int, by: int):
        table = torch.arange(size) % 3 != 0
        return lambda b, h, q, k: table[IDS[k] * 3 + by] & (q >= k + by)

    found = [held(trace(flags(size, by), "mask"), B, H, M, N) for size, by in ((17, 2), (40, 2), (40, 3))]
    assert len({mod.expr.key for mod in found}) == 1
    for (size, by), mod in zip(((17, 2), (40, 2), (40, 3)), found, strict=True):
        assert by in mod.scalars and size - 1 in mod.scalars
        q, k = torch.arange(M)[:, None], torch.arange(N)
        index = (IDS[k] * 3 + by).clamp(-size, size - 1)
        assert torch.equal(at_all_pairs(mod)[0, 0], (torch.arange(size) % 3 != 0)[index] & (q >= k + by))


def test_warm_calls_with_clamps_have_their_own_numbers():
    q, k, v = (torch.randn(1, 2, length, 16, dtype=torch.float64) for length in (40, 56, 56))

    def mods(by: int, size: int):
        table = torch.linspace(-1, 1, size, dtype=torch.float64)
        return (lambda s, b, h, i, j: s + table[i - j + by]), (lambda b, h, i, j: (i - j + by >= 0) & (i - j + by < 30))

    for by, size in ((3, 30), (5, 30), (4, 30), (3, 45), (6, 45)):
        score, mask = mods(by, size)
        scores = q @ k.transpose(2, 3) / 4
        i, j = torch.arange(40)[:, None], torch.arange(56)
        seen = (i - j + by >= 0) & (i - j + by < 30)
        bias = torch.linspace(-1, 1, size, dtype=torch.float64)[(i - j + by).clamp(0, size - 1)]
        wanted = torch.softmax((scores + bias).masked_fill(~seen, -torch.inf), -1) @ v
        found = anyattn.flex_attention(q, k, v, score, mask_mod=mask)
        rows = seen.any(1)
        assert torch.allclose(found[:, :, rows], wanted[:, :, rows], rtol=0, atol=1e-12)


@pytest.fixture
def on_a_device(monkeypatch):
    """CPU tensors are taken for a device's, whose contents the host can read only by waiting."""
    monkeypatch.setattr(visible_loads, "reading_waits", lambda mods: any(m.tensors for m in mods))
    monkeypatch.setattr(visible_loads, "_results", {})


PLACES = {  # the mods of a call, from its tensors: an index that is read, one that a mask hides, one in a mask
    "gather": lambda t, i: ([trace(lambda b, h, q, k: q >= k, "mask")], [trace(lambda s, b, h, q, k: s + t[h, i[q]], "score")]),
    "hidden": lambda t, i: (
        [trace(lambda b, h, q, k: (i[k] < 4) & (q < 4), "mask")],
        [trace(lambda s, b, h, q, k: s + t[h, i[k]] + t[h, q], "score")],
    ),
    "in a mask": lambda t, i: ([trace(lambda b, h, q, k: t[h, i[q]] >= t[h, i[k]], "mask")], []),
}


@pytest.mark.parametrize("name", PLACES)
def test_contents_on_a_device_are_read_once_for_each_write(name, on_a_device):
    table, ids = torch.rand(H, 4), torch.arange(20) % 4
    call = lambda: check_call(Dense(B, H, 20, 20), *PLACES[name](table, ids))
    first = call()
    with no_reading():
        again = call()
        if name == "gather":
            table.add_(1.0)  # as an optimizer does: entries that are no index and no part of a mask decide nothing
            call()
    assert [[m.expr for m in mods] for mods in first] == [[m.expr for m in mods] for mods in again]
    assert {id(t) for mods in again for m in mods for t in m.tensors} <= {id(table), id(ids)}
    ids[3] = -9
    with pytest.raises(ValueError, match="reads dimension 1 of a captured tensor"):
        call()
    with pytest.raises(ValueError, match="reads dimension 1 of a captured tensor"):  # an error is not remembered
        call()
    ids[3] = 2
    call()
    other = ids.clone()
    ids = other  # another tensor is read too
    with pytest.raises(Waited), no_reading():
        call()


def test_an_index_from_contents_is_clamped_on_a_device_too(on_a_device):
    """The contents may change unseen: in the replay of a CUDA graph, or by a kernel of another library."""
    table, ids = torch.rand(H, 4), torch.arange(20) % 4
    _, (score,) = check_call(Dense(B, H, 20, 20), *PLACES["gather"](table, ids))
    assert clamps(score) == 1 and score.source is not None
    check_loads(replace(score, tensors=tuple(t if t is table else t + 1000 for t in score.tensors)), B, H, 20, 20)


def test_while_a_graph_is_captured_nothing_is_read(on_a_device, monkeypatch):
    monkeypatch.setattr(visible_loads, "is_captured", lambda: True)
    table, ids = torch.rand(H, 4), torch.full((20,), 77)
    with no_reading():
        _, (score,) = check_call(Dense(B, H, 20, 20), *PLACES["gather"](table, ids))
    check_loads(score, B, H, 20, 20)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="index 77"):
        check_call(Dense(B, H, 20, 20), *PLACES["gather"](table, ids))


def test_lists_made_without_reading_clamp_an_index_from_contents():
    """``create_block_mask`` on a GPU: kernels read no entry outside a tensor, whatever the contents are."""
    table, ids = torch.rand(H, 4), torch.full((20,), 77)
    with no_reading():
        ((mask,), _) = check_call(Dense(B, H, 20, 20), PLACES["in a mask"](table, ids)[0], reads_values=False)
    check_loads(mask, B, H, 20, 20)
