"""A torch whose Dynamo has other private functions: attention runs uncompiled after one warning, with eager results."""

from __future__ import annotations

import pytest
from torch._dynamo.variables import higher_order_ops

from anyattn.custom_ops import dynamo
from tests.support.processes import python

_PROGRAM = """
import warnings, torch, torch._dynamo.variables.higher_order_ops as private
{change}
import anyattn

def call(q):
    return anyattn.flex_attention(q, q, q, mask_mod=anyattn.masks.causal()) * 2

q = torch.randn(1, 2, 40, 16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = torch.compile(call, backend="aot_eager")(q)
assert torch.equal(found, call(q))
told = [str(w.message) for w in caught if "cannot capture" in str(w.message)]
assert len(told) == 1 and {words!r} in told[0], told
"""


@pytest.mark.parametrize("name", ["speculate_subgraph", "discard_graph_changes", "make_attr", "_hop_name_to_variable_class"])
def test_a_missing_function_is_noticed_at_installation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(higher_order_ops, name)
    with pytest.raises(AttributeError, match=name):
        dynamo.install()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("del private.discard_graph_changes", "which runs uncompiled: module"),
        ("private.speculate_subgraph = lambda tx, fn: None", "unexpected keyword argument"),
    ],
)
def test_calls_run_uncompiled_after_a_warning(change: str, words: str) -> None:
    done = python("-c", _PROGRAM.format(change=change, words=words))
    assert done.returncode == 0, done.stderr
