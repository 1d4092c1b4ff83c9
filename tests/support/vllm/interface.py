"""The interface of a vLLM source tree, read with ``ast``: parameters of functions, members of enumerations, fields of records.

``python -m tests.support.vllm.interface SOURCES`` writes ``interface.json`` anew. SOURCES: the root of vLLM's source distribution.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "interface.json"
STAND_IN = HERE / "stand_in"
# What anyattn calls, extends, or is called by. A class's methods are recorded with it.
NAMES = {
    "vllm/v1/attention/backend.py": (
        "AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionMetadata", "AttentionMetadataBuilder", "AttentionType",
        "CommonAttentionMetadata", "MultipleOf",
    ),
    "vllm/v1/attention/backends/registry.py": ("AttentionBackendEnum", "register_backend"),
    "vllm/v1/attention/backends/triton_attn.py": ("TritonAttentionImpl",),
    "vllm/v1/attention/ops/triton_reshape_and_cache_flash.py": ("triton_reshape_and_cache_flash_per_token_head_quant",),
    "vllm/v1/kv_cache_interface.py": ("AttentionSpec", "KVCacheSpec", "KVQuantMode", "get_kv_quant_mode"),
    "vllm/v1/kv_cache_layout.py": ("KVCacheLayout",),
    "vllm/_custom_ops.py": ("reshape_and_cache_flash",),
}  # fmt: skip

Found = dict[str, dict[str, Any]]


def interface(root: Path) -> Found:
    """By ``file:name`` of a class or function: its parameters, or the methods' and the attributes' names and, of constants, values."""
    found: Found = {}
    for file, names in NAMES.items():
        path = root / file
        for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in names:
                found[f"{file}:{node.name}"] = _of_class(node) if isinstance(node, ast.ClassDef) else {"parameters": parameters(node)}
    return found


def parameters(node: ast.FunctionDef) -> str:
    """``name``, or ``name=`` where there is a default; with stars where they are."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    first = len(plain) - len(given.defaults)
    named = [arg.arg + "=" * (i >= first) for i, arg in enumerate(plain)]
    named += [f"*{given.vararg.arg}"] if given.vararg else []
    named += [arg.arg + "=" * (default is not None) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return ", ".join(named + ([f"**{given.kwarg.arg}"] if given.kwarg else []))


def _of_class(node: ast.ClassDef) -> dict[str, Any]:
    methods, attributes = {}, {}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            methods[part.name] = parameters(part)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            attributes[part.target.id] = None
        elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
            attributes[part.targets[0].id] = _constant(part.value)
    return {"methods": methods, "attributes": attributes}


def _constant(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return list(value) if isinstance(value, tuple) else value


def recorded() -> tuple[str, Found]:
    """The release, and its interface."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return record["release"], record["interface"]


def release_of(sources: Path) -> str:
    """The version in a source distribution's PKG-INFO, or in the metadata of an installed package."""
    texts = [sources / "PKG-INFO", *sources.glob("vllm-*.dist-info/METADATA")]
    lines = next(path for path in texts if path.exists()).read_text(encoding="utf-8").splitlines()
    return next(line.split(": ")[1] for line in lines if line.startswith("Version: "))


if __name__ == "__main__":
    sources = Path(sys.argv[1])
    record = {"release": release_of(sources), "interface": interface(sources)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
