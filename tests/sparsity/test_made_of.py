"""Block masks whose captures change after their lists were made: the lists say which blocks are visited, and inside partial blocks the mask
decides, with its captures as they are now, whatever the mask's form."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import anyattn
from anyattn import masks, oracle
from anyattn.sparsity import BlockSparseTensors
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support.compiling import fresh, nearly_same

S, BLOCK = 96, 16


class Changing:
    """A mask, and what changes a thing that it captures."""

    def __init__(self, mask: Callable, change: Callable[[], Any]):
        self.mask, self.change = mask, change


def written(start: torch.Tensor, now: torch.Tensor, mask_of: Callable[[torch.Tensor], Callable]) -> Changing:
    held = start.clone()
    return Changing(mask_of(held), lambda: held.copy_(now))


def number() -> Changing:
    width = 7

    def change() -> None:
        nonlocal width
        width = 50

    return Changing(lambda b, h, i, j: (i >= j) & (i - j < width), change)


def rebound() -> Changing:
    limit = torch.tensor([3])

    def change() -> None:
        nonlocal limit
        limit = torch.tensor([40])

    return Changing(lambda b, h, i, j: (i >= j) & (i - j < limit[0]), change)


AT = torch.arange(S)


def swapped() -> Changing:
    first, second = AT // 24, AT // 10

    def change() -> None:
        nonlocal first, second
        first, second = second, first

    return Changing(lambda b, h, i, j: (i >= j) & (first[i] <= second[j]), change)


def negated_zero() -> Changing:
    divisor = 0.0

    def change() -> None:
        nonlocal divisor
        divisor = -0.0

    return Changing(lambda b, h, i, j: ((i - j) + 0.5) / divisor > 0, change)


FORMS = {
    "ranges": lambda: written(torch.tensor(40), torch.tensor(70), lambda t: lambda b, h, i, j: (i >= j) & (j < t)),
    "documents": lambda: written(AT // 24, AT // 40, lambda t: lambda b, h, i, j: t[i] == t[j]),
    "the library's documents": lambda: written(AT // 24, AT // 40, lambda t: masks.document(t) & masks.causal()),
    "a table": lambda: written(AT % 5 < 2, AT % 7 < 3, lambda t: lambda b, h, i, j: t[(i + j) % 96] | (i == j)),
    "a number": number,
    "another tensor": rebound,
    "two tensors": swapped,
    "the sign of zero": negated_zero,
}


def meant(block_mask: Any, mask: Callable) -> Callable:
    """The rule, pair by pair."""
    classes = BlockSparseTensors.from_block_mask(block_mask).classes()[0, 0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    visible = (classes == 2) | ((classes == 1) & torch.as_tensor(mask(0, 0, AT[:, None], AT)))
    return lambda b, h, i, j: visible[i, j]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", FORMS)
def test_lists_hold_when_captures_change(form: str, is_compiled: bool) -> None:
    case, generator = FORMS[form](), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, S, 16, generator=generator)
    made = anyattn.create_block_mask(case.mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    call = torch.compile(anyattn.flex_attention, backend="eager") if is_compiled else anyattn.flex_attention
    for _ in range(2):
        call(q, k, v, block_mask=made)
    assert made.is_exact
    case.change()
    assert not made.is_exact and not copy.copy(made).is_exact and not made[:, :, 1:].is_exact
    mask = meant(made, case.mask)
    exact, plain, noise = (f(q, k, v, mask=mask).out for f in (oracle.attention, oracle.same_dtype, rounding))
    for _ in range(2):
        budget.check("out", call(q, k, v, block_mask=made), exact, plain, noise)
    again = anyattn.create_block_mask(case.mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    assert again.is_exact and torch.equal(call(q, k, v, block_mask=again), anyattn.flex_attention(q, k, v, block_mask=again))


def test_copies_are_as_exact_as_what_they_are_copies_of() -> None:
    ids = AT // 24
    made = anyattn.create_block_mask(masks.document(ids), 1, 1, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    stored, copied = pickle.dumps(made), copy.deepcopy(made)
    assert copied.is_exact and pickle.loads(stored).is_exact and made.to("cpu").is_exact
    ids.add_(1)
    assert copied.is_exact and not copy.deepcopy(made).is_exact and not pickle.loads(pickle.dumps(made)).is_exact


# ---- block masks that a compiled function makes itself


def made(mask: Callable) -> Any:
    return anyattn.create_block_mask(mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=BLOCK)


def copied(q: Tensor, k: Tensor, v: Tensor, t: Tensor, now: Tensor, mask_of: Callable) -> Tensor:
    blocks = made(mask_of(t))
    t.copy_(now)
    return anyattn.flex_attention(q, k, v, block_mask=blocks)


def written_through_a_view(q: Tensor, k: Tensor, v: Tensor, t: Tensor, now: Tensor, mask_of: Callable) -> Tensor:
    blocks, view = made(mask_of(t)), t.view(-1)
    view[S // 3 :] = now.view(-1)[S // 3 :]
    return anyattn.flex_attention(q, k, v, block_mask=blocks)


def written_as_a_result(q: Tensor, k: Tensor, v: Tensor, t: Tensor, now: Tensor, mask_of: Callable) -> Tensor:
    blocks = made(mask_of(t))
    torch.where(now == now, now, t, out=t)
    return anyattn.flex_attention(q, k, v, block_mask=blocks)


def written_by_an_operator(q: Tensor, k: Tensor, v: Tensor, t: Tensor, now: Tensor, mask_of: Callable) -> Tensor:
    blocks = made(mask_of(t))
    torch.ops.anyattn_tests_made_of.write(t, now)
    return anyattn.flex_attention(q, k, v, block_mask=blocks)


def computed(q: Tensor, k: Tensor, v: Tensor, t: Tensor, now: Tensor, mask_of: Callable) -> Tensor:
    return copied(q, k, v, t.clone(), now, mask_of)


def rebound_inside(q: Tensor, k: Tensor, v: Tensor, t: Tensor, now: Tensor, mask_of: Callable) -> Tensor:
    blocks = made(lambda b, h, i, j: mask_of(t)(b, h, i, j))
    t = now
    return anyattn.flex_attention(q, k, v, block_mask=blocks)


def after_a_graph_break(q: Tensor, k: Tensor, v: Tensor, t: Tensor, now: Tensor, mask_of: Callable) -> Tensor:
    blocks = made(mask_of(t))
    torch._dynamo.graph_break()
    t.copy_(now)
    return anyattn.flex_attention(q, k, v, block_mask=blocks)


def between_calls(q: Tensor, k: Tensor, v: Tensor, t: Tensor, now: Tensor, mask_of: Callable) -> tuple[Tensor, Tensor]:
    blocks = made(mask_of(t))
    before = anyattn.flex_attention(q, k, v, block_mask=blocks)
    t.copy_(now)
    return before, anyattn.flex_attention(q, k, v, block_mask=blocks)


_ALL = (copied, written_through_a_view, written_as_a_result, written_by_an_operator, computed, rebound_inside, after_a_graph_break)
PROGRAMS = {program.__name__: program for program in _ALL}
INSIDE: dict[str, tuple[Tensor, Tensor, Callable]] = {
    "ranges": (torch.full((S,), 40), torch.full((S,), 70), lambda t: lambda b, h, i, j: (i >= j) & (j < t[i])),
    "a number's tensor": (torch.tensor(40), torch.tensor(70), lambda t: lambda b, h, i, j: (i >= j) & (j < t)),
    "documents": (AT // 24, AT // 40, lambda t: lambda b, h, i, j: t[i] == t[j]),
    "the library's documents": (AT // 24, AT // 40, lambda t: masks.document(t) & masks.causal()),
}


def _write(t: Tensor, now: Tensor) -> None:
    t.copy_(now)


_library = torch.library.Library("anyattn_tests_made_of", "FRAGMENT")
_library.define("write(Tensor(a!) t, Tensor now) -> ()")  # without a kernel that counts the write
_library.impl("write", _write, "CompositeExplicitAutograd")
torch.library.register_fake("anyattn_tests_made_of::write", lambda t, now: None, lib=_library)


def inputs(requires_grad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, S, 16, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


def both(program: Callable, backend: str, *captured: Any, requires_grad: bool = True, is_whole: bool = True, **options: Any) -> bool:
    """Whether the compiled program does what it does in eager mode: results, gradients, and what is written."""

    def run(call: Callable) -> Callable:
        def once(*qkv: Tensor) -> tuple:
            own = [t.clone() if isinstance(t, Tensor) else t for t in captured]
            outs = call(*qkv, *own)
            return (*(outs if isinstance(outs, tuple) else (outs,)), *(t.double() for t in own if isinstance(t, Tensor)))

        return once

    compiled, _ = fresh(program, backend, **options)
    if not is_whole:
        compiled = torch.compile(program, backend=backend, **options)
    given = inputs(requires_grad)
    return all(nearly_same(run(compiled), run(program), given, given if requires_grad else ()) for _ in range(2))


BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])


@pytest.mark.covering(1, of=lambda program, form, backend: (f"{program}, {backend}", form))
@pytest.mark.parametrize("form", INSIDE)
@pytest.mark.parametrize("program", PROGRAMS)
@BACKENDS
def test_captures_that_the_compiled_function_changes(program: str, form: str, backend: str) -> None:
    assert both(PROGRAMS[program], backend, *INSIDE[form], is_whole=program != "after_a_graph_break")


@BACKENDS
def test_tables_that_the_compiled_function_changes(backend: str) -> None:
    """No shorter way than the lists: right on the CPU even if the lists are believed to follow."""
    assert both(copied, backend, AT % 5 < 2, AT % 7 < 3, lambda t: lambda b, h, i, j: t[(i + j) % 96] | (i == j))


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", INSIDE)
@BACKENDS
def test_captures_that_change_between_two_calls(backend: str, form: str) -> None:
    """Without gradients, which autograd refuses in eager and in compiled programs: a saved tensor was written to."""
    assert both(between_calls, backend, *INSIDE[form], requires_grad=False)


@pytest.mark.parametrize("dynamic", [None, True], ids=["constant", "symbolic"])
@BACKENDS
def test_numbers_that_change_inside(backend: str, dynamic: bool | None) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, width: int, other: int) -> Tensor:
        blocks = made(lambda b, h, i, j: (i >= j) & (i - j < width))
        width = other
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    assert both(program, backend, 7, 50, dynamic=dynamic)


@BACKENDS
def test_writes_through_another_argument_of_the_same_memory(backend: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, same: Tensor) -> Tensor:
        blocks = made(masks.document(ids))
        same[3:] = 1
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    def once(call: Callable) -> Callable:
        def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ids = AT // 24
            return call(q, k, v, ids, ids.view(12, 8))

        return of

    given = inputs(True)
    assert nearly_same(once(fresh(program, backend)[0]), once(program), given, given)


@BACKENDS
def test_block_masks_that_one_compiled_function_makes_and_another_takes(backend: str) -> None:
    given, changed = inputs(True), [AT // 24, AT // 24]
    make, _ = fresh(lambda ids: made(masks.document(ids)), backend)
    call = torch.compile(anyattn.flex_attention, backend=backend)
    blocks = [make(changed[0]), made(masks.document(changed[1]))]
    for ids in changed:
        ids.copy_(AT // 40)

    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v, block_mask=blocks[0])

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flex_attention(q, k, v, block_mask=blocks[1])

    assert nearly_same(compiled, eager, given, given)


def unchanged(q: Tensor, ids: Tensor, width: int) -> Tensor:
    blocks, other = made(masks.document(ids)), ids.clone()
    other.add_(1)
    return anyattn.flex_attention(anyattn.flex_attention(q, q, q, block_mask=blocks), q, q, block_mask=blocks) + other.sum()


def with_a_number(q: Tensor, ids: Tensor, width: int) -> Tensor:
    return anyattn.flex_attention(q, q, q, block_mask=made(lambda b, h, i, j: (i >= j) & (i - j < width)))


def of_computed_ids(q: Tensor, ids: Tensor, width: int) -> Tensor:
    return anyattn.flex_attention(q, q, q, block_mask=made(masks.document(ids * 2)))


def written_before(q: Tensor, ids: Tensor, width: int) -> Tensor:
    ids.add_(1)
    return unchanged(q, ids, width)


@pytest.mark.parametrize("dynamic", [None, True], ids=["constant", "symbolic"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("program", [unchanged, with_a_number, of_computed_ids, written_before])
def test_block_masks_made_inside_are_exact_where_nothing_changes(program: Callable, requires_grad: bool, dynamic: bool | None) -> None:
    """Only then may backends use documents' own kernels."""
    exact: list[bool] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        place = [a.name for a in torch.ops.anyattn.attend.default._schema.arguments].index("exactness")
        exact.extend([node.args[place] for node in graph.graph.nodes if node.target is torch.ops.anyattn.attend.default])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    call = torch.compile(program, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=record))
    call(inputs(requires_grad)[0], AT // 24, 7)
    assert exact and all(exact)


# ---- block masks from outside


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_hooks_of_saved_tensors_change_no_gradient(backend: str | None) -> None:
    """A backward pass gets copies of the lists, of which no block mask says that they still follow from it."""
    given, ids = inputs(True), AT // 24
    blocks = made(masks.document(ids))
    ids.copy_(AT // 40)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    call = plain if backend is None else fresh(plain, backend)[0]

    def hooked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            return call(q, k, v)

    assert all(nearly_same(hooked, plain, given, given) for _ in range(2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_captured_inference_tensors(backend: str) -> None:
    """torch counts no writes to them."""
    given = inputs(False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    with torch.inference_mode():
        ids = AT // 24
        blocks = made(masks.document(ids))
        compiled, _ = fresh(call, backend)
        assert nearly_same(compiled, call, given)
        ids.copy_(AT // 40)
        assert nearly_same(compiled, call, given)


@pytest.mark.parametrize("place", [0, 1], ids=["a number", "two tensors"])
def test_gradients_of_captures_that_change_back(place: int) -> None:
    """When the backward pass runs, the mask captures again what its lists were made of, and its forward pass captured something else."""
    first = [7, AT // 24, AT // 10]
    later = [[50, AT // 24, AT // 10], [7, first[2], first[1]]][place]
    captured = [*first]
    blocks = made(lambda b, h, i, j: (i >= j) & (i - j < captured[0]) & (captured[1][i] <= captured[2][j]))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    call, given = fresh(plain)[0], inputs(True)
    call(*given)

    def changed(call: Callable) -> Callable:
        def of_later(*given: Tensor) -> Tensor:
            captured[:] = later
            out = call(*given)
            captured[:] = first
            return out

        return of_later

    assert nearly_same(changed(call), changed(plain), given, given)


def test_a_copy_that_is_gone_leaves_the_others_known() -> None:
    given, width = inputs(False), 7
    blocks = made(lambda b, h, i, j: (i >= j) & (i - j < width))

    def plain(q: Tensor, k: Tensor, v: Tensor, blocks: Any) -> Tensor:
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    call = fresh(plain)[0]
    call(*given, blocks.to("cpu"))
    width = 50
    assert nearly_same(call, plain, (*given, blocks))
