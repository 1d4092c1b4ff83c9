"""The back end has the signatures that the release of vLLM calls, and the stand-in of the other tests has them too."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from tests.support.vllm import package
from tests.support.vllm.interface import STAND_IN, interface, parameters, recorded, release_of

RELEASE, RECORD = recorded()
# what vLLM calls by name on its own implementations, without a base class that declares it
UNDECLARED = "vllm/v1/attention/backends/triton_attn.py:TritonAttentionImpl"


def test_the_record_is_that_of_the_sources() -> None:
    sources = package.sources()
    if sources is None or not (sources / "vllm/v1/attention/backend.py").exists():
        pytest.skip(f"vLLM's sources are not here: set {package.SOURCES} to the root of its source distribution, or install vLLM")
    found = interface(sources)
    changed = [name for name in sorted(RECORD) if found.get(name) != RECORD[name]]
    assert not changed, f"vLLM {release_of(sources)} differs from the recorded {RELEASE} in {changed}"


def test_the_stand_in_is_a_part_of_the_record() -> None:
    found = interface(STAND_IN)
    assert set(RECORD) - set(found) == {UNDECLARED, "vllm/v1/kv_cache_interface.py:KVCacheSpec"}
    for name, part in found.items():
        theirs = RECORD[name]
        if "parameters" in part:
            assert part == theirs, name
            continue
        attributes = theirs["attributes"]
        if name.endswith(":AttentionSpec"):  # its base class has the others
            attributes = RECORD["vllm/v1/kv_cache_interface.py:KVCacheSpec"]["attributes"] | attributes
        assert set(part["attributes"]) <= set(attributes), name
        for method, given in part["methods"].items():
            if not method.startswith("__") or method == "__init__":
                assert given == theirs["methods"].get(method), f"{name}.{method}"
        values = {member: value for member, value in part["attributes"].items() if value is not None and member in theirs["attributes"]}
        enumeration = {member: value for member, value in theirs["attributes"].items() if member in values and value is not None}
        if name.endswith(("Enum", "Layout", "Mode", "Support", "Type")):
            assert enumeration.items() <= values.items(), name


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("backend.AnyAttentionBackend", "AttentionBackend"),
        ("metadata.AnyAttentionMetadataBuilder", "AttentionMetadataBuilder"),
        ("implementation.AnyAttentionImpl", "AttentionImpl"),
    ],
)
def test_ours_has_the_releases_parameters(vllm: Any, ours: str, theirs: str) -> None:
    """A method that the release does not know would never be called."""
    module, name = ours.split(".")
    made = getattr(getattr(vllm, module), name)
    known = RECORD[f"vllm/v1/attention/backend.py:{theirs}"]["methods"]
    if theirs == "AttentionImpl":
        known = RECORD[UNDECLARED]["methods"] | {"forward": known["forward"]}
    (definition,) = ast.parse(inspect.getsource(made)).body
    assert isinstance(definition, ast.ClassDef)
    methods = {part.name: parameters(part) for part in definition.body if isinstance(part, ast.FunctionDef)}
    public = {method: given for method, given in methods.items() if not method.startswith("_") or method == "__init__"}
    for method, given in public.items():
        wanted = _names(known[method])
        # defaults may be more: vLLM passes all parameters by position and may leave out the last ones
        assert _names(given) == wanted[: len(_names(given))], method
        assert set(wanted[len(_names(given)) :]) <= {"use_alibi_sqrt", "chunk_lookback"}, method


def _names(given: str) -> list[str]:
    return [name.rstrip("=") for name in given.split(", ")] if given else []
