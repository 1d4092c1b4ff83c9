"""One way through the house: every import in ``anyattn/`` goes down the design's list, and modules stay small."""

from __future__ import annotations

import ast
import graphlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "anyattn"
MAX_LINES = 500

# The design's picture from the top: a floor imports its own and lower ones (higher numbers). Whatever a person calls, or judges
# from outside, is on 0.
FLOORS: dict[str, int] = {
    "anyattn": 0,
    "anyattn.flex": 0,
    "anyattn.flash": 0,
    "anyattn.custom_ops.flash": 0,
    "anyattn.custom_ops": 0,
    "anyattn.custom_ops.flex": 0,
    "anyattn.custom_ops.eager_calls": 0,
    "anyattn.custom_ops.transforms": 0,
    "anyattn.integrations.torch_flex": 0,
    "anyattn.integrations.torch_flex_call": 0,
    "anyattn.explanation": 0,
    "anyattn.cli": 0,
    "anyattn.gallery": 0,
    "anyattn.cli.pictures": 0,
    "anyattn.oracle": 0,
    "anyattn.testing": 0,
    "anyattn.validate.window": 1,
    "anyattn.validate.flex": 1,
    "anyattn.validate.kvcache": 1,
    "anyattn.validate.flash": 1,
    "anyattn.validate.sequences": 1,
    "anyattn.problem": 1,
    "anyattn.autograd": 1,
    "anyattn.call_cache.attention": 1,
    "anyattn.call_cache.kvcache": 1,
    "anyattn.call_cache.rebind": 1,
    "anyattn.call_cache.kvcache_step": 1,
    "anyattn.call_cache.varlen": 1,
    "anyattn.plan": 2,
    "anyattn.hardware": 2,
    "anyattn.autocast": 2,
    "anyattn.sparsity": 3,
    "anyattn.kvcache": 3,
    "anyattn.backends": 4,
    # formulas: what the metadata is made by and what a kernel runs are the same code
    "anyattn.sequences": 4,
}
# Calls go down only, and what they hand over are these objects: a lower floor may import the class, by name, and nothing else
# from above. `from anyattn.plan import Plan` in a backend reads a decision; `import choose` there would take one.
HANDED_DOWN: dict[str, set[str]] = {
    "anyattn.custom_ops.entry_points": {"block_lists"},  # for create_block_mask, an entry point itself
    "anyattn.problem": {"Problem"},
    "anyattn.plan": {"Plan"},
    "anyattn.hardware": {"Hardware"},
    "anyattn.sparsity.block_sparse": {"BlockSparseTensors"},
    "anyattn.sparsity.varlen_block_sparse": {"VarlenBlockSparseTensors"},
    # a mask that comes without lists gets them from where everybody does
    "anyattn.sparsity.compute": {"tile_lists"},
    # documents that may be run as sequences: a kernel is launched for each
    "anyattn.documents.rewrite": {
        "DocumentTables",
        "Documents",
        "documents_of",
        "form_of",
        "keeps_tables",
        "over_sequences",
        "tables_of",
    },
    "anyattn.sparsity.lists": {"kept_transposed"},
    "anyattn.sparsity.varlen_lists": {"RaggedLists", "ragged_lists"},
}
# May be imported by everyone, and so import nothing but one another.
SHARED = (
    "anyattn.autocast",
    "anyattn.mods",
    "anyattn.errors",
    "anyattn.tensors.by_contents",
    "anyattn.disk_cache",
    "anyattn.launch_log",
    "anyattn.fast_dataclass",
    "anyattn.tensors.strides",
    "anyattn.tensors.kinds",
)
DECLARED = {"torch", "numpy", "click", "rich", "triton", "cutlass", "cuda", "tvm_ffi", "filelock", "matplotlib", "anyattn"}


@dataclass(frozen=True)
class Edge:
    importer: str
    imported: str
    line: int
    name: str = ""  # what `from imported import name` took out of the module
    is_lazy: bool = False  # inside a function

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name + ' from ' if self.name else ''}{self.imported}"


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules() -> dict[str, Path]:
    return {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _type_only_lines(tree: ast.Module) -> set[int]:
    """Lines under ``if TYPE_CHECKING:``: a name for an annotation is not a dependency of the code that runs."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for inner in node.body:
                lines.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    return lines


def _lazy_lines(tree: ast.Module) -> set[int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    return {line for f in functions for line in range(f.lineno, (f.end_lineno or f.lineno) + 1)}


def _imports(name: str, source: str, is_package: bool, known: set[str]) -> list[Edge]:
    """Every import in ``source``, those inside functions included, by absolute name."""
    tree = ast.parse(source)
    skipped, lazy = _type_only_lines(tree), _lazy_lines(tree)
    package = name.split(".") if is_package else name.split(".")[:-1]
    found: list[Edge] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node.lineno not in skipped:
            found += [Edge(name, alias.name, node.lineno, is_lazy=node.lineno in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.lineno not in skipped:
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from anyattn import errors` imports the submodule, not the front door.
                full = f"{base}.{alias.name}"
                taken = (full, "") if full in known else (base, alias.name)
                found.append(Edge(name, taken[0], node.lineno, taken[1], node.lineno in lazy))
    return found


def _home(module: str) -> str:
    """The row of the table that ``module`` belongs to."""
    return ".".join(module.split(".")[:2])


def _complaint(edge: Edge) -> str | None:
    if edge.imported.split(".")[0] != "anyattn":
        return None
    source, target = _home(edge.importer), _home(edge.imported)
    if target in SHARED:
        return None
    if source in SHARED:
        return f"{edge}: mods/ and errors.py are imported by everyone and may import only one another"
    if FLOORS[source] > FLOORS[target] and edge.name not in HANDED_DOWN.get(edge.imported, ()):
        return f"{edge}: imports go down the list only (HANDED_DOWN names the objects that lower floors are given)"
    if source == target == "anyattn.backends":
        mine, theirs = edge.importer.split(".")[2:3], edge.imported.split(".")[2:3]
        if mine and theirs and mine != theirs:
            return f"{edge}: backends never import one another"
    return None


def _all_imports() -> list[Edge]:
    modules = _modules()
    return [edge for name, path in modules.items() for edge in _imports(name, path.read_text(), path.name == "__init__.py", set(modules))]


def test_every_module_has_a_place() -> None:
    lost = sorted({_home(name) for name in _modules()} - set(FLOORS) - set(SHARED))
    assert not lost, f"give these a floor here: {lost}"


def test_imports_go_down_only() -> None:
    complaints = [text for edge in _all_imports() if (text := _complaint(edge))]
    assert not complaints, "\n" + "\n".join(complaints)


def test_no_module_waits_for_itself() -> None:
    """Imports made while loading form no cycle, whatever the floors say; one inside a function may look back in its own room."""
    graph: dict[str, set[str]] = {name: set() for name in _modules()}
    for edge in _all_imports():
        if edge.imported in graph and edge.imported != edge.importer and not edge.is_lazy:
            graph[edge.importer].add(edge.imported)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_what_is_handed_down_exists() -> None:
    for module, names in HANDED_DOWN.items():
        made = {n.name for n in ast.parse(_modules()[module].read_text()).body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
        assert names <= made, f"{module} has no {names - made}"


@pytest.mark.parametrize(
    ("importer", "source", "legal"),
    [
        ("anyattn.backends.torch.forward", "from anyattn.plan import Plan", True),
        ("anyattn.backends.torch.forward", "from anyattn.problem import Problem", True),
        ("anyattn.backends.torch.forward", "from anyattn.plan import Plan, choose", False),
        ("anyattn.backends.torch.forward", "from anyattn import plan", False),
        ("anyattn.backends.torch.forward", "import anyattn.plan", False),
        ("anyattn.backends.torch.forward", "from anyattn.validate.flex import tensors", False),
        ("anyattn.backends.torch.forward", "from anyattn.sparsity.block_sparse import BlockSparseTensors", True),
        ("anyattn.plan", "from anyattn.problem import Problem", True),
        ("anyattn.plan", "from anyattn import check", False),
        ("anyattn.autograd", "from anyattn.flex import flex_attention", False),
        ("anyattn.validate.flex", "def f():\n    from anyattn.sparsity.block_sparse import BlockSparseTensors", True),
        ("anyattn.backends.torch.forward", "def f():\n    from anyattn.backends.triton import x", False),
        ("anyattn.backends.torch.forward", "from ..triton import emit", False),
        ("anyattn.backends.torch.forward", "from . import softmax", True),
        ("anyattn.backends.torch.forward", "from anyattn.sparsity import schedule", False),
        ("anyattn.mods.tracing.trace", "from anyattn.sparsity import block_sparse", False),
        ("anyattn.mods.tracing.trace", "from anyattn.errors import ModError", True),
        ("anyattn.sparsity.compute", "from anyattn import flex_attention", False),
        ("anyattn.sparsity.compute", "from anyattn import errors", True),
        ("anyattn.sparsity.compute", "if TYPE_CHECKING:\n    from anyattn.plan import Plan", True),
        ("anyattn.flex", "from anyattn.backends import torch as backend", True),
    ],
)
def test_the_checker_itself(importer: str, source: str, legal: bool) -> None:
    known = {*_modules(), "anyattn.backends.triton"}
    complaints = [_complaint(edge) for edge in _imports(importer, source, False, known)]
    assert any(complaints) is not legal


def test_modules_stay_small() -> None:
    sizes = {name: len(path.read_text().splitlines()) for name, path in _modules().items()}
    large = {name: lines for name, lines in sizes.items() if lines > MAX_LINES}
    assert not large, f"over {MAX_LINES} lines, split by role: {large}"


def test_only_declared_dependencies_are_imported() -> None:
    """A package that pyproject.toml does not declare would work on the machine of its author only."""
    strays = [
        str(edge) for edge in _all_imports() if (top := edge.imported.split(".")[0]) not in DECLARED and top not in sys.stdlib_module_names
    ]
    assert not strays, "\n" + "\n".join(strays)
