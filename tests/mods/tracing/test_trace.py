"""What a mod may say, what it is told when it says something else, and that no trace is ever remembered wrongly."""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
import itertools
import math
import operator
import types

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

import anyattn
from anyattn import ModError, masks
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing.trace import trace

B, H, M, N = 2, 3, 4, 5
INDICES = [torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1), torch.arange(M).view(-1, 1), torch.arange(N)]
SCORE = torch.linspace(-2.0, 2.0, B * H * M * N).reshape(B, H, M, N)


def mask_values(fn, **kwargs):
    return evaluate(trace(fn, "mask", **kwargs), *INDICES).expand(B, H, M, N)


def score_values(fn, **kwargs):
    return evaluate(trace(fn, "score", **kwargs), *INDICES, score=SCORE).expand(B, H, M, N)


def by_calling(fn, *more, score=False):
    """The user's function called on every index, as torch's vmap would."""
    out = torch.empty(B, H, M, N, dtype=torch.float32 if score else torch.bool)
    for at in itertools.product(range(B), range(H), range(M), range(N)):
        indices = tuple(torch.tensor(i) for i in at)
        out[at] = fn(SCORE[at], *indices, *more) if score else fn(*indices, *more)
    return out


def same_mask(fn):
    for _ in range(2):  # the second time from memory
        assert torch.equal(mask_values(fn), by_calling(fn))


def same_score(fn):
    for _ in range(2):
        assert torch.equal(score_values(fn), by_calling(fn, score=True))


# ---- forms of callables


def window_of(n):
    return lambda b, h, q, k: q - k < n


class Banded(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.gain = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self.register_buffer("shift", torch.tensor(2))

    def mask(self, b, h, q, k):
        return (q - k < self.width) & (k <= q + self.shift)

    def score(self, s, b, h, q, k):
        return s * self.gain[h]

    def forward(self, b, h, q, k):
        return q + k < self.width


class Callable_:
    limit = 3  # of the class

    def __init__(self, offset):
        self.offset = offset

    def __call__(self, b, h, q, k):
        return (q + self.offset >= k) & (q < self.limit)

    @staticmethod
    def static(b, h, q, k):
        return q > k

    @classmethod
    def of_class(cls, b, h, q, k):
        return q < cls.limit


def with_defaults(b, h, q, k, width=2):
    return q - k < width


def with_keyword(b, h, q, k, *, width=2):
    return q - k < width


def calls_others(b, h, q, k):
    return window_of(2)(b, h, q, k) | with_defaults(b, h, q, k, 1) | Callable_(1)(b, h, q, k)


def partial_of_closure(n):
    def f(m, b, h, q, k, *, least):
        return (q - k < n) & (k > m) & (q > least)

    return functools.partial(f, 1, least=0)


FORMS = {
    "lambda": lambda b, h, q, k: q >= k,
    "closure": window_of(2),
    "partial": functools.partial(lambda n, b, h, q, k: q - k < n, 2),
    "partial_of_closure": partial_of_closure(3),
    "partial_of_partial": functools.partial(functools.partial(lambda n, m, b, h, q, k: q - k * m < n, 2), 3),
    "object": Callable_(1),
    "method": Callable_(1).__call__,
    "static_method": Callable_.static,
    "class_method": Callable_.of_class,
    "module": Banded(4),
    "module_method": Banded(2).mask,
    "default": with_defaults,
    "keyword_only": with_keyword,
    "nested": calls_others,
    "and_masks": and_masks(window_of(2), window_of(3), lambda b, h, q, k: h != 1),
    "or_masks": or_masks(window_of(-1), lambda b, h, q, k: k == q),
    "nested_combinators": and_masks(or_masks(window_of(-1), FORMS_LEAF := (lambda b, h, q, k: k == q)), FORMS_LEAF),
    "noop_mask": lambda b, h, q, k: noop_mask(b, h, q, k) | (q < 0),
    "wrapped": anyattn.mod(window_of(2)),
    "wrapped_inside": lambda b, h, q, k: masks.causal()(b, h, q, k) & masks.sliding_window(1, 1)(b, h, q, k),
    "operator_module": lambda b, h, q, k: operator.and_(operator.ge(q, k), operator.lt(q - k, 2)),
}


@pytest.mark.parametrize("name", FORMS)
def test_any_callable(name):
    same_mask(FORMS[name])


def test_noop_mask_itself():
    assert bool(mask_values(noop_mask).all())


def test_module_methods_as_scores():
    same_score(Banded(2).score)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("rank", range(5))
def test_captured_integers(rank, dtype):
    shape = (B, H, M, N)[4 - rank :]
    table = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    same_mask(lambda b, h, q, k: (table[(b, h, q, k)[4 - rank :]] if rank else table) != 1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("rank", range(5))
def test_captured_floats(rank, dtype, parameter):
    shape = (B, H, M, N)[4 - rank :]
    table = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    table = torch.nn.Parameter(table) if parameter else table
    same_score(lambda s, b, h, q, k: s + (table[(b, h, q, k)[4 - rank :]] if rank else table))


bucket = torch.tensor([0, 1, 2, 2, 3, 3, 1, 0, 2])
table = torch.randn(4, N, generator=torch.Generator().manual_seed(0))

INDEXING = {
    "nested": lambda s, b, h, q, k: s + table[bucket[q - k], k],
    "one_at_a_time": lambda s, b, h, q, k: s + table[h][q],
    "colon": lambda s, b, h, q, k: s + table[:, q][h],
    "ellipsis": lambda s, b, h, q, k: s + table[..., k][q],
    "negative": lambda s, b, h, q, k: s + table[-1, q - k],
    "constant_first": lambda s, b, h, q, k: s + table[0][k],
    "slice_outside": lambda s, b, h, q, k: s + table[1:][h % 2, q],
    "shape": lambda s, b, h, q, k: s + table[h, torch.clamp(q + k, max=table.shape[1] - 1)],
    "transposed": lambda s, b, h, q, k: s + table.T[k, h],
    "captured_scalar_index": lambda s, b, h, q, k: s + table[bucket[bucket[h]]][k],
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name):
    same_score(INDEXING[name])


class Side(enum.IntEnum):
    LEFT = 2


three, np_half, np_two = 3, np.float64(0.5), np.int64(2)
ARITHMETIC = {
    "floordiv": lambda s, b, h, q, k: s + (q - k) // 2 + (-k) // three,
    "modulo": lambda s, b, h, q, k: s + (q - k) % 3 + (k - q) % three,
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "where_method": lambda s, b, h, q, k: s.where(q >= k, 0.0),
    "abs": lambda s, b, h, q, k: s - 0.5 * abs(q - k) - torch.abs(s) - s.abs(),
    "minmax": lambda s, b, h, q, k: torch.minimum(s, q * 0.5) + torch.maximum(s, torch.tensor(0.25)),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -1, 1) + s.clamp(min=0) + torch.clamp(q - k, max=1),
    "casts": lambda s, b, h, q, k: s + q.to(torch.float32) / 3 + k.float() + (q > k).int() + (s * 2).to(torch.int64) + s.half(),
    "numpy_numbers": lambda s, b, h, q, k: s * np_half + np_half * q + np_two - k * np_two + np.float64(2) ** h,
    "int_enum": lambda s, b, h, q, k: s + torch.where(q - k < Side.LEFT, 1.0, 0.0),
    "reflected": lambda s, b, h, q, k: 1 - s + 2 * q - 3 / (1 + k) + 7 // (1 + q) + 5 % (1 + k),
    "python_loop": lambda s, b, h, q, k: sum((s * i for i in range(three)), s),
    "math_of_captured": lambda s, b, h, q, k: s * math.sqrt(three),
    "tensor_of_captured": lambda s, b, h, q, k: torch.maximum(s, torch.tensor(three * 0.1)) + torch.tensor(three) * torch.as_tensor(q),
    "list_of_captured": lambda s, b, h, q, k: s + torch.tensor([1, three, 5])[h],
    "products_of_conditions": lambda s, b, h, q, k: s * (q == k) + ~(q < k) * 2,
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name):
    same_score(ARITHMETIC[name])


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sigmoid", "sqrt", "rsqrt", "exp2", "log2", "log1p", "expm1", "sin", "cos", "erf"])
def test_functions_are_torchs(name):
    f = getattr(torch, name)
    got = score_values(lambda s, b, h, q, k: f(abs(s) + 0.5))
    assert torch.equal(got, f(abs(SCORE) + 0.5))
    if hasattr(torch.Tensor, name):
        assert torch.equal(score_values(lambda s, b, h, q, k: getattr(abs(s) + 0.5, name)()), got)


# ---- aux_tensors


def test_aux_tensors():
    aux = [torch.tensor([0, 1, 1, 2, 2]), torch.tensor(0.5)]

    def mask(b, h, q, k, aux_tensors):
        return aux_tensors[0][q] == aux_tensors[0][k]

    def score(s, b, h, q, k, aux):
        return s + aux[0][k] * aux[1]

    assert torch.equal(mask_values(mask, aux_tensors=aux), by_calling(mask, aux))
    assert torch.equal(score_values(score, aux_tensors=aux), by_calling(score, aux, score=True))
    other = [torch.tensor([0, 0, 0, 1, 1]), torch.tensor(2.0)]  # from memory, other tensors
    assert torch.equal(score_values(score, aux_tensors=other), by_calling(score, other, score=True))
    assert torch.equal(mask_values(FORMS["lambda"], aux_tensors=aux), by_calling(FORMS["lambda"])), "not asked for: not passed"


def test_optional_aux():
    def score(s, b, h, q, k, aux_tensors=None):
        return s if aux_tensors is None else s + aux_tensors[0]

    assert torch.equal(score_values(score), SCORE)
    assert torch.equal(score_values(score, aux_tensors=[torch.tensor(1.0)]), SCORE + 1)


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        (lambda s, b, h, q, k, aux: s, "score", "passes no aux_tensors"),
        (lambda q, k: q, "mask", "takes 2 arguments; wanted 4"),
        (lambda a, b, c, d, e, f, g: a, "score", "takes 7 arguments; wanted 5"),
        (7, "mask", "mask_mod is a int"),
    ],
)
def test_wrong_number_of_arguments(fn, kind, words):
    with pytest.raises(TypeError, match=words):
        trace(fn, kind)


# ---- what cannot be said


def branches(b, h, q, k):
    if q > k:
        return q == 0
    return k == 0


def early(b, h, q, k):
    while q < k:
        return True
    return q == k


def over_lines(b, h, q, k):
    near = q - k < 3
    return near & (k > 0) and (q > k)


def chain_over_lines(b, h, q, k):
    return q - 3 <= k <= q


ILLEGAL = {
    "and": (lambda b, h, q, k: q >= k and k > 1, "q >= k and k > 1", "use & instead of `and`"),
    "or": (lambda b, h, q, k: q >= k or k > 1, "q >= k or k > 1", "use | instead of `or`"),
    "not": (lambda b, h, q, k: not (q >= k), "not (q >= k)", "use ~ instead of `not`"),
    "chain": (lambda b, h, q, k: k <= q < k + 3, "k <= q < k + 3", "split the chained comparison"),
    "shift_is_no_chain": (lambda b, h, q, k: bool((q >> 1) < k), "(q >> 1) < k", "compare with torch operations"),
    "if": (branches, "q > k", "use torch.where"),
    "conditional": (lambda b, h, q, k: q == 0 if (q > k) & (k > 0) else k == 0, "(q > k) & (k > 0)", "use torch.where"),
    "while": (early, "q < k", "use torch.where"),
    "min": (lambda b, h, q, k: min(q, 3) == k, "min(q, 3)", "use torch.minimum"),
    "max": (lambda b, h, q, k: torch.where(q > k, max(q, k), q) == k, "max(q, k)", "use torch.minimum"),
    "and_inside_if": (lambda b, h, q, k: q == 0 if q > k and k > 0 else k == 0, "q > k and k > 0", "use & instead of `and`"),
    "over_lines": (over_lines, "near", "use & instead of `and`"),
    "chain_over_lines": (chain_over_lines, "q - 3 <= k", "split the chained comparison"),
    "loop_over_tensor": (lambda b, h, q, k: sum(t[0] for t in table[h]) > q, "table[h]", "index it"),
    "len": (lambda b, h, q, k: len(q) > 0, "len(q)", "captured tensor.shape"),
    "loop_over_index": (lambda b, h, q, k: [i for i in q][0] == k, "in q", "loop over range"),  # noqa: C416, RUF015
    "range_of_index": (lambda b, h, q, k: sum(range(q)) > k, "range(q)", "one Python number"),
    "item": (lambda b, h, q, k: q.item() > k, "q.item()", ".item() needs one Python number"),
    "function": (lambda b, h, q, k: torch.cumsum(q, 0) > k, "torch.cumsum(q, 0)", "torch.cumsum has no meaning"),
    "method": (lambda b, h, q, k: q.softmax(-1) > k, "q.softmax", ".softmax has no meaning"),
    "numpy": (lambda b, h, q, k: np.nextafter(q, k) > 3, "np.nextafter(q, k)", "numpy's nextafter"),
    "list": (lambda b, h, q, k: q + [1] > k, "q + [1]", "use numbers"),  # noqa: RUF005
    "in": (lambda b, h, q, k: q in (1, 2), "q in (1, 2)", ""),
    "text": (lambda b, h, q, k: q + "a" > k, 'q + "a"', "use numbers"),
    "unindexed": (lambda b, h, q, k: table[q] > 0, "table[q]", "index every dimension"),
    "unindexed_method": (lambda b, h, q, k: table[q].cumsum(0) > 0, "table[q].cumsum", "index every dimension"),
    "too_many_indices": (lambda b, h, q, k: table[q, k, b] > 0, "table[q, k, b]", "one index per dimension"),
    "float_index": (lambda b, h, q, k: table[q / 2, k] > 0, "table[q / 2, k]", "convert it: table[x.to(torch.int64)]"),
    "bool_index": (lambda b, h, q, k: table[q > 1, k] > 0, "table[q > 1, k]", "convert it"),
    "slice": (lambda b, h, q, k: table[q, 1:3] > 0, "table[q, 1:3]", "outside the mod"),
    "constant_out_of_range": (lambda b, h, q, k: table[q, 9] > 0, "table[q, 9]", "out of range"),
    "where_on_number": (lambda b, h, q, k: torch.where(q, k, b) > 0, "torch.where(q, k, b)", "condition"),
    "bits_of_float": (lambda b, h, q, k: (q / 2) & k > 0, "(q / 2) & k", "convert one side"),
    "complex": (lambda b, h, q, k: torch.tensor(1j) * q > 0, "torch.tensor(1j) * q", "real dtype"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_bodies_name_line_and_cure(name):
    fn, quoted, cure = ILLEGAL[name]
    with pytest.raises(ModError) as error:
        trace(fn, "mask")
    message = str(error.value)
    assert __file__ in message and quoted in message and cure in message, message


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        (lambda b, h, q, k: q - k, "mask", "return a bool"),
        (lambda s, b, h, q, k: q > k, "score", "pass it as mask_mod"),
        (lambda b, h, q, k: None, "mask", "returned nothing"),
        (lambda b, h, q, k: (q > k, k), "mask", "returned tuple"),
    ],
)
def test_wrong_results(fn, kind, words):
    with pytest.raises(ModError, match=words):
        trace(fn, kind)


def test_a_users_folder_called_torch_is_quoted(tmp_path):
    folder = tmp_path / "site-packages" / "torch" / "anyattn" / "mods"
    folder.mkdir(parents=True)
    path = folder / "functools.py"
    path.write_text("def mine(b, h, q, k):\n    return q >= k and k > 1\n")
    spec = importlib.util.spec_from_file_location("mine_in_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ModError, match=r"functools\.py:2\n    q >= k and k > 1|return q >= k and k > 1"):
        trace(module.mine, "mask")


def test_a_body_without_source_still_explains():
    space: dict = {}
    exec("def f(b, h, q, k):\n    return q >= k and k > 1", space)
    with pytest.raises(ModError, match="<source not available>"):
        trace(space["f"], "mask")


# ---- keys


def test_values_do_not_enter_the_key():
    assert trace(window_of(3), "mask").key == trace(window_of(70), "mask").key
    assert trace(window_of(3), "mask").key != trace(window_of(3.0), "mask").key, "another kind of number is another program"
    a, b = (lambda t: lambda s, b, h, q, k: s + t[h])(torch.zeros(3)), (lambda t: lambda s, b, h, q, k: s + t[h])(torch.ones(9))
    assert trace(a, "score").key == trace(b, "score").key


def test_structure_enters_the_key():
    keys = [
        trace(f, "mask").key
        for f in (
            lambda b, h, q, k: q >= k,
            lambda b, h, q, k: q > k,
            lambda b, h, q, k: k >= q,
            lambda b, h, q, k: q >= k + 1,
            lambda b, h, q, k: q >= k + 2,
            lambda b, h, q, k: table[h, q] > 0,
            lambda b, h, q, k: table[0, q] > 0,
            lambda b, h, q, k: bucket[q] > 0,
        )
    ]
    assert len(set(keys)) == len(keys)


def test_unused_captures_and_order_do_not_enter_the_key():
    def of(first, second, unused):
        return lambda b, h, q, k: (q - k < second) & (unused != "x") & (k > first)

    def swapped(first, second):
        return lambda b, h, q, k: (q - k < first) & (k > second)

    assert trace(of(1, 2, "y"), "mask").key == trace(swapped(2, 1), "mask").key


def test_range_pins_its_number():
    def loops(n, m):
        def f(b, h, q, k):
            seen = q == k
            for i in range(n):
                seen = seen | (q - k == i * m)
            return seen

        return f

    same_mask(loops(2, 1))
    same_mask(loops(3, 1))
    same_mask(loops(2, 2))
    assert trace(loops(2, 1), "mask").key == trace(loops(2, 5), "mask").key != trace(loops(3, 1), "mask").key


# ---- memory is never stale


def test_rebinding_a_cell():
    width = 1

    def f(b, h, q, k):
        return q - k < width

    same_mask(f)
    for width in (3, -1, 2.5):  # noqa: B007
        same_mask(f)
    width = torch.tensor(2)
    same_mask(f)


limit = 2


def below_limit(b, h, q, k):
    return q + k < limit


def calls_below_limit(b, h, q, k):
    return below_limit(b, h, q, k) & (q > 0)


def test_rebinding_a_global(monkeypatch):
    for value in (2, 5, 2.5, torch.tensor(4)):
        monkeypatch.setitem(globals(), "limit", value)
        same_mask(below_limit)
        same_mask(calls_below_limit)
    monkeypatch.setitem(globals(), "below_limit", lambda b, h, q, k: q == k)
    same_mask(calls_below_limit)


@pytest.mark.parametrize(
    "make", [lambda o: o, lambda o: o.__call__, lambda o: lambda b, h, q, k: o(b, h, q, k)], ids=["object", "method", "inside"]
)
@pytest.mark.parametrize("kind", [Callable_, Banded], ids=["object", "module"])
def test_rebinding_an_attribute(kind, make):
    owner = kind(1)
    for value in (1, 3):
        setattr(owner, "offset" if kind is Callable_ else "width", value)
        same_mask(make(owner))


def test_rebinding_a_class_attribute(monkeypatch):
    owner = Callable_(1)
    for value in (1, 3):
        monkeypatch.setattr(Callable_, "limit", value)
        same_mask(owner)


def test_rebinding_a_function_attribute():
    def helper(q):
        return q + helper.by

    def f(b, h, q, k):
        return helper(q) >= k + f.width

    for f.width, helper.by in ((1, 0), (2, 0), (2, 3)):
        same_mask(f)


def test_rebinding_a_users_module_attribute(monkeypatch):
    settings = types.ModuleType("settings_of_the_user")
    monkeypatch.setitem(__import__("sys").modules, settings.__name__, settings)

    def imports(b, h, q, k):
        import settings_of_the_user

        return q - k < settings_of_the_user.width

    for settings.width in (1, 3):
        same_mask(lambda b, h, q, k: q - k < settings.width)
        same_mask(imports)


@pytest.mark.parametrize("wrap", [list, tuple, lambda x: dict(enumerate(x))], ids=["list", "tuple", "dict"])
def test_changing_a_container(wrap):
    def make(box):
        return lambda b, h, q, k: q - k < box[0]

    for value in (1, 3):
        same_mask(make(wrap([value])))
    box = {0: 1}
    get = box.get
    for box[0] in (1, 3):
        same_mask(lambda b, h, q, k: q - k < get(0))


def test_replacing_a_captured_tensor():
    def make(t):
        return lambda s, b, h, q, k: s + t[h]

    for t in (torch.zeros(3), torch.ones(3), torch.arange(4.0), torch.arange(3), torch.ones(3, dtype=torch.float64)):
        same_score(make(t))
    t = torch.zeros(3)
    f = make(t)
    same_score(f)
    t += 1
    same_score(f)


def test_swapped_and_aliased_tensors():
    def make(s_, t):
        return lambda s, b, h, q, k: s * s_[h] + t[h]

    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    for pair in ((x, y), (y, x), (x, x), (y, y), (x, y)):
        same_score(make(*pair))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        int,
        float,
        lambda t: t.tolist(),
        lambda t: t.numpy().item(),
        lambda t: 4 if t > 2 else 1,
        lambda t: len(range(t)),
        lambda t: (t + 1).item(),
        lambda t: [1, 2, 3, 4, 5, 6][t],
        lambda t: t.sum(),
    ],
    ids=["item", "int", "float", "tolist", "numpy", "if", "range", "derived", "index", "sum"],
)
def test_reading_a_captured_tensors_value(read):
    def make(t):
        return lambda b, h, q, k: q - k < read(t)

    t = torch.tensor(1)
    f = make(t)
    same_mask(f)
    t.fill_(3)
    same_mask(f)
    same_mask(make(torch.tensor(2)))


def test_partials_of_closures_keep_their_numbers_apart():
    def make(n, m):
        def f(x, b, h, q, k):
            return (q - k < n) & (k >= x)

        return functools.partial(f, m)

    for n, m in ((3, 0), (1, 2), (2, 1)):
        same_mask(make(n, m))


def test_names_are_those_of_the_mod():
    assert trace(masks.sliding_window(1, 0), "mask").name == "sliding_window(left=1, right=0)"
    assert trace(masks.sliding_window(2, 0), "mask").name == "sliding_window(left=2, right=0)"


def test_default_dtype_is_part_of_the_meaning():
    fn = lambda b, h, q, k: q * 0.1 < k * 0.3
    try:
        keys = {torch.set_default_dtype(d) or trace(fn, "mask").key for d in (torch.float32, torch.float64)}
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(keys) == 2


class _Called:
    def __call__(self, b, h, q, k, more=3):
        return q + more >= k


class _Any:
    def __call__(self, *args):
        return args[2] >= args[3]


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: q,
        lambda b, h, q, k, x=1, *, y: q,
        lambda *args: args,
        lambda b, h, *rest, y=2: b,
        functools.wraps(lambda a: a)(lambda b, h, q, k: q),
        functools.partial(lambda b, h, q, k, n: q, n=4),
        _Called(),
        _Called().__call__,
        _Any(),
        masks.causal(),
        max,
    ],
)
def test_arguments_are_those_of_the_signature(fn):
    from anyattn.mods.tracing.trace import _arguments

    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:
        assert _arguments(fn) is None
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names, required, takes_any = _arguments(fn)
    assert names == tuple(p.name for p in positional)
    assert required == len([p for p in positional if p.default is p.empty])
    assert takes_any == any(p.kind is p.VAR_POSITIONAL for p in parameters)


def test_a_zeros_sign_is_a_number_of_its_own():
    """0.0 and -0.0 are equal, but a mod may ask for the sign."""

    def by(number):
        return lambda b, h, q, k: q >= k if math.copysign(1.0, number) > 0 else q <= k

    for number, op in ((0.0, "ge"), (-0.0, "le"), (0.0, "ge"), (-0.0, "le"), (-2.0, "le")):
        assert trace(by(number), "mask").expr.output.op == op
