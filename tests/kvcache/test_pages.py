"""PagedKVCache: a decode loop through the front door, random histories against lists of rows, and every refusal."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import anyattn
from anyattn import OutOfPagesError, PagedKVCache
from anyattn.kvcache.rotary import apply_rotary


def small(num_pages: int = 8, **kwargs: object) -> PagedKVCache:
    return PagedKVCache(num_pages, 4, 2, 3, **{"dtype": torch.float32, **kwargs})


def poison(cache: PagedKVCache) -> None:
    for layer in range(cache.num_layers):
        cache.k_cache(layer).fill_(math.nan)
        cache.v_cache(layer).fill_(math.nan)


def stored(pool: Tensor, table: Tensor, count: int) -> Tensor:
    """(count, H, D): what a page table's row says that a sequence's tokens are, one at a time."""
    size = pool.shape[1]
    return torch.stack([pool[int(table[t // size]), t % size] for t in range(count)]) if count else pool.new_empty(0, *pool.shape[2:])


def snapshot(cache: PagedKVCache, handles: list[int]) -> tuple[object, ...]:
    pools = [bytes(p(i).contiguous().view(torch.uint8).numpy()) for i in range(cache.num_layers) for p in (cache.k_cache, cache.v_cache)]
    lengths = [cache.seqlens(handles, i).tolist() for i in range(cache.num_layers)]
    return (pools, lengths, cache.page_table(handles).tolist(), cache.free_pages, repr(cache))


# ---- random histories

TOKENS = st.integers(0, 9)


class Histories(RuleBasedStateMachine):
    """Sequences come, grow and go; each one's rows are kept in a list beside the cache, in order."""

    @initialize(pages=st.integers(0, 10), size=st.sampled_from((1, 2, 3, 5)), layers=st.sampled_from((1, 1, 2)))
    def start(self, pages: int, size: int, layers: int) -> None:
        self.cache = PagedKVCache(pages, size, 2, 3, head_dim_v=4, num_layers=layers, dtype=torch.float32)
        poison(self.cache)
        self.pages, self.size, self.layers = pages, size, layers
        # by handle: rows of keys by layer (a value's row is the key's first element, four times), and the pages it is known to hold
        self.rows: dict[int, list[list[Tensor]]] = {}
        self.known_pages: dict[int, list[int]] = {}
        self.ever: set[int] = set()
        self.count = 0.0

    def _fresh(self, n: int) -> Tensor:
        """n rows of keys that were never seen before, so that a row in the wrong place shows."""
        rows = self.count + torch.arange(n * 2 * 3, dtype=torch.float32).view(n, 2, 3)
        self.count += n * 2 * 3
        return rows

    def _some(self, data: st.DataObject) -> list[int]:
        """Up to four sequences, none of them twice."""
        return data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, max_size=4, unique=True)) if self.rows else []

    def _tokens(self, handle: int) -> int:
        return min(map(len, self.rows[handle]))

    def _held(self, handle: int) -> int:
        return len(self.known_pages[handle])

    def _attempt(self, call: Callable[[], None], wanted: dict[int, int]) -> bool:
        """``call`` succeeds exactly if the pages that ``wanted`` tokens by handle need are free, and changes nothing otherwise."""
        needed = sum(max(0, math.ceil(n / self.size) - self._held(handle)) for handle, n in wanted.items())
        free = self.pages - sum(map(self._held, self.rows))
        if needed <= free:
            call()
            for handle, n in wanted.items():
                self._note_pages(handle, max(self._held(handle), math.ceil(n / self.size)))
            return True
        before = snapshot(self.cache, list(self.rows))
        with pytest.raises(OutOfPagesError, match=rf"^{needed} more pages of {self.size} tokens.* of {self.pages} only {free} are free"):
            call()
        assert snapshot(self.cache, list(self.rows)) == before
        return False

    def _note_pages(self, handle: int, count: int) -> None:
        table = self.cache.page_table(handle)[0].tolist()
        assert len(table) == count, "exactly the pages that are needed"
        assert table[: self._held(handle)] == self.known_pages[handle], "a sequence keeps its pages"
        self.known_pages[handle] = table

    @rule()
    def add(self) -> None:
        handle = self.cache.add_sequence()
        assert handle not in self.ever
        self.ever.add(handle)
        self.rows[handle], self.known_pages[handle] = [[] for _ in range(self.layers)], []

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.free(handle)
        del self.rows[handle], self.known_pages[handle]
        for call in (self.cache.free, self.cache.page_table, self.cache.seqlens):
            with pytest.raises(ValueError, match=f"sequence {handle} was freed"):
                call(handle)

    @rule(data=st.data(), is_one_count=st.booleans())
    def reserve(self, data: st.DataObject, is_one_count: bool) -> None:
        some = self._some(data)
        new = [data.draw(TOKENS)] * len(some) if is_one_count else [data.draw(TOKENS) for _ in some]
        counts = new[0] if is_one_count and some else new
        self._attempt(lambda: self.cache.reserve(some, counts), {h: self._tokens(h) + n for h, n in zip(some, new)})

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        """A step through all layers, lists of different lengths or one tensor."""
        some, stacked = self._some(data), data.draw(st.booleans())
        new = [data.draw(TOKENS)] * len(some) if stacked else [data.draw(TOKENS) for _ in some]
        for layer in range(self.layers):
            keys = [self._fresh(n) for n in new]
            values = [k[..., :1].expand(*k.shape[:2], 4) for k in keys]
            k, v = (torch.stack(keys), torch.stack(values)) if stacked and some else (keys, values)
            wanted = {h: len(self.rows[h][layer]) + n for h, n in zip(some, new)}
            if not self._attempt(lambda k=k, v=v, layer=layer: self.cache.append(some, k, v, layer), wanted):
                assert layer == 0, "the first layer reserved for all"
                return
            for handle, part in zip(some, keys):
                self.rows[handle][layer] += list(part)

    @rule(data=st.data(), n=TOKENS)
    def step(self, data: st.DataObject, n: int) -> None:
        """What an attention call does: reserve, write through pools and page table, advance."""
        some = self._some(data)
        if not self._attempt(lambda: self.cache.reserve(some, n), {h: self._tokens(h) + n for h in some}):
            return
        table, held = self.cache.page_table(some), self.cache.seqlens(some)
        assert table.dtype is held.dtype is torch.int32
        for b, handle in enumerate(some):
            for layer in range(self.layers):
                keys = self._fresh(n)
                for j in range(n):
                    page, row = divmod(int(held[b]) + j, self.size)
                    self.cache.k_cache(layer)[int(table[b, page]), row] = keys[j]
                    self.cache.v_cache(layer)[int(table[b, page]), row] = keys[j, :, :1].expand(2, 4)
                self.rows[handle][layer] += list(keys)
        self.cache.advance(some, n)

    @invariant()
    def no_page_is_owned_twice(self) -> None:
        owned = [page for handle in self.rows for page in self.cache.page_table(handle)[0].tolist()]
        assert len(set(owned)) == len(owned) and set(owned) <= set(range(self.pages))
        assert self.cache.free_pages == self.pages - len(owned)

    @invariant()
    def contents_survive(self) -> None:
        handles = list(self.rows)
        table = self.cache.page_table(handles)
        assert table.shape == (len(handles), max(map(self._held, handles), default=0))
        assert self.cache.seqlens(handles).tolist() == [self._tokens(h) for h in handles]
        for b, handle in enumerate(handles):
            assert table[b, self._held(handle) :].tolist() == [0] * (table.shape[1] - self._held(handle))
            for layer, rows in enumerate(self.rows[handle]):
                keys = torch.stack(rows) if rows else torch.empty(0, 2, 3)
                assert torch.equal(stored(self.cache.k_cache(layer), table[b], len(rows)), keys)
                assert torch.equal(stored(self.cache.v_cache(layer), table[b], len(rows)), keys[..., :1].expand(-1, -1, 4))


Histories.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)
TestHistories = Histories.TestCase


@pytest.mark.slow
class TestMoreHistories(Histories.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


# ---- with the attention that it is made for


def test_decode_loop_equals_contiguous_caches() -> None:
    """Three layers, rotary, prompts of different lengths: the same bits as contiguous caches that hold the same tokens."""
    torch.manual_seed(0)
    layers, prompts, heads, width, page_size = 3, [5, 1, 11], 2, 8, 4
    cache = PagedKVCache(20, page_size, heads, width, num_layers=layers, dtype=torch.float32)
    poison(cache)
    for _ in range(3):  # a used pool: pages come in another order than that of the sequences
        cache.reserve(cache.add_sequence(), 9)
    cache.free([0, 2])
    sequences = [cache.add_sequence() for _ in prompts]
    flat = [[torch.full((3, 32, heads, width), math.nan) for _ in range(2)] for _ in range(layers)]
    angle = torch.rand(40, width // 2)
    rotary = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "causal": True}
    for layer in range(layers):
        prompt = [torch.randn(2, n, heads, width) for n in prompts]
        keys = [apply_rotary(p[0], angle.cos(), angle.sin(), torch.arange(len(p[0])), interleaved=True) for p in prompt]
        cache.append(sequences, keys, [p[1] for p in prompt], layer)
        for b, (key, (_, value)) in enumerate(zip(keys, prompt)):
            flat[layer][0][b, : len(key)], flat[layer][1][b, : len(key)] = key, value
    lengths = torch.tensor(prompts)
    for step in range(9):
        cache.reserve(sequences, 1)
        for layer in range(layers):
            q, k, v = torch.randn(3, 3, 1, heads, width)
            args = {"k": k, "v": v, **rotary}
            got = anyattn.flash_attn_with_kvcache(
                q, cache.k_cache(layer), cache.v_cache(layer),
                cache_seqlens=cache.seqlens(sequences), page_table=cache.page_table(sequences), **args,
            )  # fmt: skip
            expected = anyattn.flash_attn_with_kvcache(q, *flat[layer], cache_seqlens=lengths + step, **args)
            assert torch.equal(got, expected), (step, layer)
        cache.advance(sequences, 1)
    assert cache.seqlens(sequences).tolist() == [n + 9 for n in prompts]
    table = cache.page_table(sequences)
    for layer in range(layers):
        for b, n in enumerate(prompts):
            for pool, one in zip((cache.k_cache(layer), cache.v_cache(layer)), flat[layer]):
                assert torch.equal(stored(pool, table[b], n + 9), one[b, : n + 9])


# ---- lengths, pages and what is shown


def test_reserving_twice_hands_out_once() -> None:
    cache = small()
    a = cache.add_sequence()
    assert (cache.page_table(a).shape, cache.free_pages) == ((1, 0), 8)
    cache.reserve(a, 4)
    cache.reserve(a, 4)
    assert cache.page_table(a).shape == (1, 1) and cache.free_pages == 7
    cache.advance(a, 4)
    cache.reserve(a, 0)
    assert cache.free_pages == 7
    cache.reserve(a, 1)
    assert cache.free_pages == 6


def test_freed_pages_are_used_again() -> None:
    cache = small(2)
    a = cache.add_sequence()
    cache.reserve(a, 8)
    pages = cache.page_table(a)[0].tolist()
    b = cache.add_sequence()
    with pytest.raises(OutOfPagesError):
        cache.reserve(b, 1)
    cache.free(a)
    assert cache.free_pages == 2
    cache.reserve(b, 8)
    assert cache.page_table(b)[0].tolist() == pages


def test_a_token_counts_when_every_layer_has_it() -> None:
    cache = small(num_layers=2)
    a, b = cache.add_sequence(), cache.add_sequence()
    k = torch.randn(2, 5, 2, 3)
    cache.append([a, b], k, k, layer=1)
    assert cache.seqlens([a, b]).tolist() == [0, 0]
    assert [cache.seqlens([a, b], layer).tolist() for layer in range(2)] == [[0, 0], [5, 5]]
    with pytest.raises(ValueError, match=r"sequence 0 holds \[0, 5\] tokens by layer.*append to the other layers first"):
        cache.advance([a, b], 1)
    cache.append(a, k[:1, :2], k[:1, :2], layer=1)  # behind what this layer has, whatever the others do
    cache.append([b, a], [k[1], torch.cat((k[0], k[0, :2]))], [k[1], torch.cat((k[0], k[0, :2]))], layer=0)
    assert cache.seqlens([b, a]).tolist() == [5, 7] and cache.free_pages == 4
    assert torch.equal(stored(cache.k_cache(0), cache.page_table(a)[0], 7), stored(cache.k_cache(1), cache.page_table(a)[0], 7))


def test_handles_in_any_form() -> None:
    cache = small()
    a, b = cache.add_sequence(), cache.add_sequence()
    cache.reserve(torch.tensor([b, a]), torch.tensor([5, 1]))
    assert [cache.page_table(h).shape[1] for h in (a, b)] == [1, 2]
    cache.advance((b, a), (5, 1))
    assert cache.seqlens(range(2)).tolist() == [1, 5] and cache.seqlens(torch.tensor(b)).tolist() == [5]
    assert cache.page_table([b, a, b]).shape == (3, 2)  # reading twice is harmless
    assert cache.seqlens([]).shape == (0,) and cache.page_table([]).shape == (0, 0)
    cache.reserve([], 3)
    cache.append([], [], [])
    cache.free([a, b])
    assert cache.free_pages == 8


def test_pools_and_repr() -> None:
    cache = PagedKVCache(6, 16, 2, 64, head_dim_v=32, num_layers=3, dtype=torch.bfloat16)
    assert cache.k_cache(2).shape == (6, 16, 2, 64) and cache.v_cache(0).shape == (6, 16, 2, 32)
    assert cache.k_cache(1).dtype is torch.bfloat16 and cache.k_cache(1).data_ptr() == cache.k_cache(1).data_ptr()
    cache.k_cache(1)[3] = 1.0
    assert bool((cache.k_cache(1)[3] == 1).all()) and not bool(cache.k_cache(0).any()) and not bool(cache.k_cache(2).any())
    cache.reserve(cache.add_sequence(), 17)
    assert repr(cache) == (
        "PagedKVCache(6 pages of 16 tokens, 4 of them free; 1 sequences; 3 layers, 2 heads, head_dim 64 (values 32), torch.bfloat16 on cpu)"
    )


def test_no_gradient_is_recorded() -> None:
    cache = small()
    k = torch.randn(1, 3, 2, 3, requires_grad=True)
    cache.append(cache.add_sequence(), k, k * 2)
    assert not cache.k_cache().requires_grad and cache.v_cache().grad_fn is None


# ---- refusals


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_pages": -1}, ValueError, "num_pages is -1; wanted an integer >= 0"),
        ({"page_size": 0}, ValueError, "page_size is 0; wanted an integer >= 1"),
        ({"num_heads_kv": 0}, ValueError, "num_heads_kv is 0"),
        ({"head_dim": 2.0}, TypeError, "head_dim is 2.0.*pass 2"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v is 0"),
        ({"num_layers": 0}, ValueError, "num_layers is 0"),
        ({"dtype": torch.int32}, TypeError, "dtype is torch.int32; wanted a float dtype"),
        ({"dtype": "float32"}, TypeError, "dtype is 'float32'; wanted a float dtype"),
        ({"device": "nonsense"}, ValueError, "device is 'nonsense'; wanted a torch.device or the name of one"),
        ({"device": None}, ValueError, "device is None; wanted a torch.device or the name of one"),
        *(
            []
            if torch.cuda.is_available()
            else [({"device": "cuda"}, ValueError, "device is 'cuda', which torch has not here: .*wanted 'cpu'")]
        ),
    ],
    ids=str,
)
def test_bad_sizes(change: dict, error: type[Exception], message: str) -> None:
    good = {"num_pages": 4, "page_size": 4, "num_heads_kv": 2, "head_dim": 3, "dtype": torch.float32}
    with pytest.raises(error, match=message):
        PagedKVCache(**{**good, **change})


def test_the_dtype_has_no_default() -> None:
    with pytest.raises(TypeError, match="dtype"):
        PagedKVCache(4, 4, 2, 3)  # type: ignore[call-arg]


_K = torch.zeros(2, 3, 2, 3)
_WRONG_CALLS = {
    "unknown": (lambda c: c.seqlens([0, 7]), ValueError, r"sequence 7 is unknown to this cache; wanted a handle that its add_sequence\(\)"),
    "freed": (lambda c: c.reserve([0, 2], 1), ValueError, r"sequence 2 was freed, and its pages may belong to another.*add_sequence\(\)"),
    "freed twice": (lambda c: c.free(2), ValueError, "sequence 2 was freed"),
    "free names one twice": (lambda c: c.free([0, 0]), ValueError, "handles has sequence 0 twice"),
    "twice": (lambda c: c.reserve([0, 1, 0], 1), ValueError, "handles has sequence 0 twice; wanted each once"),
    "advance twice": (lambda c: c.advance([1, 1], 1), ValueError, "handles has sequence 1 twice"),
    "append twice": (lambda c: c.append([1, 1], _K, _K), ValueError, "handles has sequence 1 twice"),
    "float handle": (lambda c: c.reserve(0.0, 1), TypeError, "handles is 0.0"),
    "text handle": (lambda c: c.reserve([0, "1"], 1), TypeError, r"handles\[1\] is '1'"),
    "negative handle": (lambda c: c.seqlens(-1), ValueError, "handles is -1"),
    "negative count": (lambda c: c.reserve([0, 1], [1, -1]), ValueError, r"new_tokens\[1\] is -1; wanted an integer >= 0"),
    "counts": (lambda c: c.reserve([0, 1], [1]), ValueError, "new_tokens has 1 entries for 2 sequences; wanted one for each, or one int"),
    "advance counts": (lambda c: c.advance([0, 1], [1, 2, 3]), ValueError, "n has 3 entries for 2 sequences"),
    "not reserved": (
        lambda c: c.advance([0, 1], [1, 3]),
        ValueError,
        "n=3 for sequence 1, which holds 2 tokens on 1 pages of 4; wanted at most 2: call reserve",
    ),
    "layer": (lambda c: c.k_cache(1), ValueError, "layer is 1 but the cache has 1; wanted 0 to 0, or more num_layers"),
    "negative layer": (lambda c: c.v_cache(-1), ValueError, "layer is -1"),
    "append layer": (lambda c: c.append([0, 1], _K, _K, 3), ValueError, "layer is 3"),
    "batch": (lambda c: c.append([0], _K, _K), ValueError, r"k has shape \(2, 3, 2, 3\); wanted \(1, new tokens, 2, 3\), or a list of 1"),
    "heads": (lambda c: c.append([0, 1], _K, _K[:, :, :1]), ValueError, r"v has shape \(2, 3, 1, 3\); wanted \(2, new tokens, 2, 3\)"),
    "rank": (lambda c: c.append([0, 1], _K[0], _K[0]), ValueError, r"k has shape \(3, 2, 3\)"),
    "not tensors": (lambda c: c.append([0], 3.0, _K), TypeError, "k is a float; wanted a tensor"),
    "list too short": (lambda c: c.append([0, 1], [_K[0]], [_K[0]]), ValueError, "k has 1 tensors for 2 sequences; wanted one for each"),
    "list of lists": (lambda c: c.append([0], [[1.0]], [_K[0]]), TypeError, r"k\[0\] is a list; wanted a tensor"),
    "list rank": (lambda c: c.append([0], [_K], [_K]), ValueError, r"k\[0\] has shape \(2, 3, 2, 3\); wanted \(new tokens, 2, 3\)"),
    "dtype": (lambda c: c.append([0, 1], _K, _K.double()), ValueError, r"v\[0\] is torch.float64 on cpu but the cache is torch.float32"),
    "lengths": (lambda c: c.append([0, 1], _K, _K[:, 1:]), ValueError, r"k has \[3, 3\] new tokens by sequence but v has \[2, 2\]"),
    "pages": (lambda c: c.reserve([0, 1], [9, 20]), OutOfPagesError, "7 more pages of 4 tokens are needed, but of 8 only 6 are free; noth"),
    "append pages": (lambda c: c.append([0, 1], _K.repeat(1, 6, 1, 1), _K.repeat(1, 6, 1, 1)), OutOfPagesError, "8 more pages of 4"),
}


@pytest.mark.parametrize("name", _WRONG_CALLS)
def test_wrong_calls_change_nothing(name: str) -> None:
    call, error, message = _WRONG_CALLS[name]
    cache = small()
    handles = [cache.add_sequence() for _ in range(3)]
    cache.append(handles, *torch.randn(2, 3, 2, 2, 3))
    cache.free(handles[2])
    before = snapshot(cache, handles[:2])
    with pytest.raises(error, match=message):
        call(cache)
    assert snapshot(cache, handles[:2]) == before
