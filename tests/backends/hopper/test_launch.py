"""What names a compiled kernel, what a launch costs once it is known, and that what is compiled here loads in another process."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import json
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anyattn import disk_cache, masks, planner
from anyattn.backends import repeater_of
from anyattn.backends.hopper import api
from anyattn.backends.hopper.compile import build, cache_key, launch
from anyattn.backends.hopper.compile.cache_key import NoContentError, key_of
from anyattn.backends.hopper.config import Ask, Config, Tiles
from anyattn.backends.hopper.make_config import TILES_IN_ORDER
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from anyattn.triton_tools import launch_log
from tests.support.counting import PYTHON_CALLS
from tests.support.hopper.pretended import H200
from tests.support.processes import ROOT, python

FLOAT, INT = float, int
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs nvidia-cutlass-dsl and apache-tvm-ffi",
)


def config(**changes: Any) -> Config:
    return Config(**({"head_dim": 128, "head_dim_v": 128, "is_bf16": True, "tiles": Tiles(128, 128, 2)} | changes))


def band(mask: Any) -> Any:
    """The expression of a mask's row ranges."""
    ranges = row_ranges(trace(mask, "mask"))
    assert ranges is not None
    return ranges.expr


def scaled(by: float, table: torch.Tensor) -> Any:
    return lambda s, b, h, i, j: s * by + table[h, j]


def problem(sizes: tuple[int, ...] = (1, 2, 64, 128), score: Any = None, **changes: Any) -> Problem:
    q = torch.zeros(sizes, dtype=torch.bfloat16)
    traced = None if score is None else trace(score, "score")
    return Problem(**({"q": q, "k": q, "v": q, "scale": 0.1, "score": traced, "predicates": (trace(masks.causal(), "mask"),)} | changes))


def named(p: Problem) -> tuple[Config, tuple]:
    """The config and the kinds that ``run.forward`` launches ``p`` with."""
    found: list[tuple] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "launch", lambda c, arguments: found.append((c, launch.kinds_of(arguments)[0])))
        repeater_of(p, planner.choose(p, H200)).forward(p)
    return found[0]


# --- names


def test_equal_content_has_one_key_whatever_the_values() -> None:
    first = key_of(*named(problem(score=scaled(2.0, torch.zeros(2, 64)))))
    assert first == key_of(*named(problem(score=scaled(3.5, torch.ones(2, 99)))))
    assert first == key_of(*named(problem((3, 5, 700, 128), score=scaled(2.0, torch.zeros(5, 700)))))
    assert first != key_of(*named(problem(score=lambda s, b, h, i, j: s * 2.0)))
    assert first != key_of(*named(problem(score=scaled(2.0, torch.zeros(2, 64, dtype=torch.float16)))))
    assert first != key_of(*named(problem(score=scaled(2.0, torch.zeros(64, 2).T))))
    assert key_of(*named(problem(predicates=(trace(masks.sliding_window(5, 0), "mask"),)))) == key_of(
        *named(problem(predicates=(trace(masks.sliding_window(77, 3), "mask"),)))
    )


def test_each_part_of_a_config_and_of_the_kinds_changes_the_key() -> None:
    score = trace(lambda s, b, h, i, j: s * 0.5, "score").expr
    causal = row_ranges(trace(masks.causal(), "mask"))
    assert causal is not None
    ask = Ask(causal.expr, True)
    other = {
        **{"head_dim": 64, "head_dim_v": 64, "is_bf16": False, "tiles": Tiles(128, 64, 2), "score": score, "bands": (causal.expr,)},
        **{"lists": "dense", "spread": "heads", "list_cut": (1, 2), "partial": ask, "always": (ask,), "heads_per_tile": 4, "piece": 16},
    }
    needs_others = {"is_bounded", "has_count", "gathers", "has_one_kv", "pairs", "is_split", "counts_skips", "in_order", "has_entries"}
    keys = [key_of(config(), ())]
    for field in dataclasses.fields(Config):
        assert field.name in other or isinstance(field.default, bool), f"give {field.name} another value here"
        if field.name not in needs_others:
            keys.append(key_of(config(**{field.name: other.get(field.name, not field.default)}), ()))
    keys.append(key_of(config(is_bounded=True, score=score), ()))  # of scores that a mod bounds
    keys.append(key_of(config(has_order=True, has_count=True), ()))
    keys.append(key_of(config(has_skip=True, counts_skips=True), ()))
    keys += [key_of(config(has_entries=True, has_order=ordered, spread="heads"), ()) for ordered in (False, True)]
    keys += [key_of(config(piece=1, gathers=gathers), ()) for gathers in (False, True)]
    keys += [key_of(config(tiles=TILES_IN_ORDER[128, 128], in_order=ordered), ()) for ordered in (False, True)]
    wide = config(head_dim=512, head_dim_v=512, tiles=Tiles(64, 32, 2, False))
    keys += [key_of(dataclasses.replace(wide, has_one_kv=one, pairs=two), ()) for one in (False, True) for two in (False, True)]
    of_sequences = dataclasses.replace(wide, has_entries=True, has_lse=True, spread="heads")
    keys += [key_of(dataclasses.replace(of_sequences, is_split=split), ()) for split in (False, True)]
    keys += [key_of(config(), kinds) for kinds in ((FLOAT,), (INT,), (1, INT), (torch.float32, 1), (torch.float32, -1), (type(None),))]
    assert len(set(keys)) == len(keys)


def test_a_kernel_is_listed_by_a_name_for_people() -> None:
    score = trace(lambda s, b, h, i, j: s * 0.5, "score").expr
    assert build.name_of(config()) == "full"
    assert build.name_of(config(bands=(band(masks.causal()),), has_lse=True)) == "causal + lse"
    window = config(bands=(band(masks.sliding_window(5, 0)),), has_sink=True, score=score)
    assert build.name_of(window) == f"window + score {score.key[:8]} + sink"


def test_our_sources_and_versions_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of(config(), ())}
    for name, changed in (
        ("sources", lambda: "others"),
        ("_version", lambda _: "9.9"),
        ("_processor", lambda: "abacus"),
        ("ARCH", "sm_91a"),
    ):
        with monkeypatch.context() as patch:
            cache_key._surroundings.cache_clear()
            patch.setattr(cache_key, name, changed)
            keys.add(key_of(config(), ()))
    cache_key._surroundings.cache_clear()
    assert len(keys) == 5


def test_the_sources_are_all_that_a_kernel_is_traced_through() -> None:
    """Follows the imports from the kernel, those inside functions too."""
    seen, waiting = set(), ["anyattn.backends.hopper.kernel.forward"]
    while waiting:
        name = waiting.pop()
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    roots = tuple(f"anyattn.{name.removesuffix('.py').replace('/', '.')}" for name in cache_key.SOURCES)
    strays = {name for name in seen if name.startswith("anyattn") and not name.startswith(roots)}
    # errors.py holds exception classes alone, and fast_dataclass.py makes an object of a dictionary
    assert (
        strays <= {"anyattn.errors", "anyattn.fast_dataclass"}
        and {f"{roots[0]}.kernel.mma", f"{roots[0]}.codegen.emit", "anyattn.mods.ir.dependence", "anyattn.arithmetic"} <= seen
    )


def test_what_has_no_content_has_no_name() -> None:
    with pytest.raises(NoContentError, match="function"):
        cache_key.canonical((1, lambda x: x))


# --- launches


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple]]:
    """Compiling and loading replaced by notes: what was compiled, as (config, kinds); a launch appends its arguments."""
    notes: list[tuple] = []

    def make(config: Config, kinds: tuple, may_link: bool = True) -> disk_cache.Payload:
        notes.append((config, kinds))
        return disk_cache.Payload(b"\x7fELF", {"form": "object", "runtime": "", "function": "f"})

    monkeypatch.setattr(build, "make", make)
    monkeypatch.setattr(build, "load", lambda payload: lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(build, "has_tvm_ffi", lambda: True)
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ANYATTN_CACHE", raising=False)
    ran.clear()
    launch.forget()
    yield notes
    launch.forget()


ran: list[tuple] = []


def go(p: Problem) -> None:
    repeater_of(p, planner.choose(p, H200)).forward(p)


def test_a_thousand_shapes_and_new_closures_compile_once(built: list[tuple]) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        b, h, s = (int(n) for n in torch.randint(1, 9, (3,), generator=generator))
        go(problem((b, h, 8 * s, 128), score=scaled(float(s), torch.zeros(h, 8 * s))))
    assert len(built) == 1 and len(ran) == 1000
    go(problem(score=lambda s, b, h, i, j: s * 2.0))
    assert len(built) == 2


def test_a_launch_of_a_known_kernel_asks_for_nothing(built: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    c, arguments = config(), (torch.zeros(1, 2, 3, 128, dtype=torch.bfloat16), None, 1.0, 2, (0.5,), (torch.zeros(3),))
    launch.launch(c, arguments)
    monkeypatch.setattr(launch, "prepare", None)
    monkeypatch.setattr(Config, "__hash__", None)
    launch.launch(c, arguments)
    assert len(built) == 1 and ran[0] is not arguments and all(x is y for x, y in zip(ran[1], arguments, strict=True))


def test_equal_configs_share_a_kernel_and_travel_without_it(built: list[tuple]) -> None:
    first = config()
    launch.launch(first, (1.0,))
    launch.launch(config(), (2.0,))
    launch.launch(pickle.loads(pickle.dumps(first)), (3.0,))
    assert len(built) == 1 and ran == [(1.0,), (2.0,), (3.0,)]


def test_kinds_tell_what_a_kernel_must_know_and_no_more() -> None:
    t = torch.zeros(4, 6)
    same = [t, torch.zeros(9, 2), t[:2, 1:], t.expand(4, 6), torch.zeros(6, 1).T.T, t.requires_grad_(), torch.nn.Parameter(t)]
    assert {launch.kinds_of((x,)) for x in same} == {((torch.float32, 2), True)}
    for other, kinds in (
        (t.T, (torch.float32, -2)),
        (torch.zeros(4, 1).expand(4, 6), (torch.float32, -2)),
        (t.detach().bfloat16(), (torch.bfloat16, 2)),
        (None, (type(None),)),
        (2, (INT,)),
        (2.0, (FLOAT,)),
        ((), (0,)),
        ((1, (2.0, t)), (2, INT, 2, FLOAT, torch.float32, 2)),
    ):
        assert launch.kinds_of((other,)) == (kinds, True)
    for odd, kinds in ((t.detach().bool(), (torch.bool, 2)), (t[0, 0].detach(), (torch.float32, 0))):
        assert launch.kinds_of((odd,)) == (kinds, False) and launch.kinds_of((1, (odd,))) == ((INT, 1, *kinds), False)


def test_bools_go_as_bytes_and_single_values_as_vectors(built: list[tuple]) -> None:
    flags, one = torch.tensor([[True, False]]), torch.tensor(3.0)
    launch.launch(config(), (flags, (one, 1)))
    (sent_flags, (sent_one, number)) = ran[0]
    assert (sent_flags.dtype, sent_flags.data_ptr()) == (torch.uint8, flags.data_ptr()) and number == 1
    assert (sent_one.shape, sent_one.data_ptr()) == ((1,), one.data_ptr())


def test_without_tvm_ffi_tensors_are_wrapped(built: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "has_tvm_ffi", lambda: False)
    monkeypatch.setattr(build, "dlpack_function", lambda c, kinds: lambda *a: ran.append((kinds, a)))
    launch.launch(config(), (1.0,))
    assert ran == [((FLOAT,), (1.0,))] and not built


def test_with_no_name_or_no_cache_a_kernel_stays_in_memory(built: list[tuple], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nameless(*_: object) -> str:
        raise NoContentError("a function")

    with monkeypatch.context() as patch:
        patch.setattr(launch, "key_of", nameless)
        launch.launch(config(), (1.0,))
    monkeypatch.setenv("ANYATTN_CACHE", "0")
    launch.launch(config(), (1,))
    assert len(built) == 2 and not list(tmp_path.rglob("*.kernel"))
    monkeypatch.setenv("ANYATTN_CACHE", "1")
    launch.launch(config(), (None,))
    assert len(list(tmp_path.rglob("*.kernel"))) == 1


def test_what_cannot_be_loaded_is_compiled_and_said(built: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([OSError("not permitted"), lambda *arguments: ran.append(arguments)])

    def load(payload: disk_cache.Payload) -> Any:
        found = next(loads)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(build, "load", load)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        launch.launch(config(), (1.0,))
    assert len(built) == 2 and ran == [(1.0,)]


def test_launches_are_noted_while_somebody_asks(built: list[tuple]) -> None:
    with launch_log.noting() as names:
        for _ in range(2):
            launch.launch(config(has_lse=True), (1.0,))
    launch.launch(config(), (1.0,))
    assert names == ["hopper full + lse"] * 2 and launch_log.noted is None


def test_what_is_forgotten_is_found_on_disk(built: list[tuple]) -> None:
    c = config()
    for _ in range(3):
        launch.launch(c, (1.0,))
        launch.forget()
    assert len(built) == 1 and len(ran) == 3


def test_what_is_sound_on_disk_but_no_kernel_is_made_again(built: list[tuple], tmp_path: Path) -> None:
    c = config()
    launch.launch(c, (1.0,))
    (path,) = tmp_path.rglob("*.kernel")
    good, cache = path.read_bytes(), disk_cache.DiskCache(path.parent)
    for data, facts in ((b"PK\x03\x04", {}), (b"\x7fELF", {"form": "library"}), (b"\x7fELF", {"form": 3, "runtime": [], "function": None})):
        path.write_bytes(disk_cache._pack(disk_cache.Payload(data, facts), path.stem))
        assert cache.get(path.stem) is not None
        launch.forget()
        launch.launch(c, (1.0,))
        assert path.read_bytes() == good
    assert len(built) == 4 and len(ran) == 4


def test_compiling_only_runs_nothing_and_keeps_nothing_in_memory(built: list[tuple]) -> None:
    c = config()
    with launch.compiling_only():
        launch.launch(c, (1.0,))
    assert len(built) == 1 and not ran
    launch.launch(c, (1.0,))
    assert len(built) == 1 and ran == [(1.0,)], "it was found on disk"


@needs_compiler
def test_bytes_that_are_no_library_are_an_error_to_go_on_from() -> None:
    facts = {"form": "library", "runtime": build._runtime(), "function": "f"}
    for other in ({}, {"runtime": "nowhere.so"}):
        with pytest.raises(OSError):
            build.load(disk_cache.Payload(b"no library", facts | other))


@needs_compiler
def test_an_argument_of_no_known_kind_is_named() -> None:
    with pytest.raises(TypeError, match="str; wanted a tensor"):
        build._example(str, iter(()), is_nested=False)


# --- compiling

SCRIPT = (
    PYTHON_CALLS
    + """
import json, os, sys
from pathlib import Path
import torch
from anyattn.backends.hopper.compile import launch
from anyattn import masks
from anyattn.backends.hopper.config import Config, Tiles
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace

flags, one, ids, table = torch.zeros(2, 64).bool(), torch.tensor(1.0), torch.zeros(64, dtype=torch.int32), torch.zeros(64, 2)
by, shift = 2.0, 3

def score(s, b, h, i, j):
    return torch.where(flags[h, j], s * by * one, s - table[i, h]) + ids[j] + shift * (i - j)

traced = trace(score, "score")
causal = row_ranges(trace(masks.causal(), "mask"))
config = Config(64, 64, True, Tiles(128, 64, 2), traced.expr, (causal.expr,), has_sink=True, has_lse=True)
q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
tensors = tuple(t.T.contiguous().T if t is table else t for t in traced.tensors)
counter = torch.zeros(2, dtype=torch.int32)
given = (q, q, q, q, torch.zeros(1, 2, 64), None, torch.zeros(2), *[None] * 7, counter, 1.0, 1, 2, 2, 1)
arguments = (*given, (*traced.scalars, *causal.scalars), tensors)
kinds, _ = launch.kinds_of(arguments)
for step in sys.argv[1:]:
    launch.forget()
    if step == "torn, no linker":
        (file,) = Path(os.environ["ANYATTN_CACHE_DIR"]).rglob("*.kernel")
        file.write_bytes(file.read_bytes()[:-1])
        os.environ["PATH"] = "/nowhere"
    calls = calls_of(lambda: launch.prepare(config, kinds)) if step == "warm" else None
    try:
        launch.launch(config, arguments)
        said = ""
    except ValueError as error:
        said = str(error)
    print(json.dumps({"calls": calls, "compiler": "cutlass" in sys.modules, "said": said}))
"""
)


def in_a_process(folder: Path, *steps: str, **environment: str) -> list[dict[str, Any]]:
    """What is seen after each step, in which the kernel is forgotten, prepared and launched.

    Before the step "torn, no linker" its file is torn, and from then on there is no linker.
    """
    done = python("-c", SCRIPT, *steps, ANYATTN_CACHE_DIR=str(folder), **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()[-len(steps) :]]
    for result in results:  # the kernel is there and looks at its arguments: this machine's tensors are not a GPU's
        assert "expected device_type=cuda" in result["said"] and "scale_log2: float32" in result["said"]
    return results


@needs_compiler
def test_what_one_process_compiled_another_loads_without_the_compiler(tmp_path: Path) -> None:
    """And where there is no linker, or the file is torn, with it. Whatever the seed of hashes, a kernel has one key."""
    (cold,) = in_a_process(tmp_path, "cold", PYTHONHASHSEED="7")
    (file,) = (tmp_path / "kernels").glob("*.kernel")
    whole = file.read_bytes()
    warm, torn = in_a_process(tmp_path, "warm", "torn, no linker", PYTHONHASHSEED="8")
    assert cold["compiler"] and not warm["compiler"]
    assert warm["calls"] < 100_000  # 35,000; of compiling 2.7 million
    assert torn["compiler"], "a torn file was taken"
    written, stored = file.stat().st_mtime, disk_cache.DiskCache(file.parent).get(file.stem)
    assert list(tmp_path.rglob("*.kernel")) == [file] and file.read_bytes() != whole[:-1]
    assert stored is not None and stored.facts["form"] == "object"
    (of_object,) = in_a_process(tmp_path, "object", PATH="/nowhere")
    assert of_object["compiler"], "an object file is loaded by the compiler"
    assert file.stat().st_mtime == written, "it was compiled again"


@pytest.mark.slow  # in this process the tests below launch without the cache
@needs_compiler
def test_without_the_cache_nothing_is_written(tmp_path: Path) -> None:
    assert in_a_process(tmp_path, "no cache", ANYATTN_CACHE="0")[0]["compiler"]
    assert not list(tmp_path.rglob("*.kernel"))


@needs_compiler
def test_it_compiles_for_wrapped_tensors_too() -> None:
    p = problem(score=scaled(2.0, torch.zeros(64, 2).T), wants_lse=True)
    assert callable(build.dlpack_function(*named(p)))


# What a kernel says of arguments that pass its checks on a machine whose driver is missing: it was about to load its device code.
ACCEPTED = "CUDA"


@pytest.fixture(scope="module")
def checked() -> Any:
    """Launches one config with CPU tensors that claim to be a GPU's; what the kernel said, and how many kernels there are by now."""
    from tests.support.hopper.pretend_cuda import on_cuda

    load, kernels = build.load, {}  # kept from call to call; the patches are not
    made = config(
        head_dim=64,
        tiles=Tiles(128, 64, 2),
        head_dim_v=64,
        score=trace(scaled(2.0, torch.zeros(2, 64)), "score").expr,
        bands=(band(masks.causal()),),
    )

    def go(q: torch.Tensor, table: torch.Tensor, right: int = 1) -> tuple[str, int]:
        with pytest.MonkeyPatch.context() as patch, pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
            patch.setattr(launch, "_kernels", kernels)
            patch.setattr(build, "load", lambda payload: (lambda function: lambda *a: function(*on_cuda(a)))(load(payload)))
            patch.setenv("ANYATTN_CACHE", "0")
            counter = torch.zeros(2, dtype=torch.int32)
            launch.launch(made, (q, q, q, q, *[None] * 10, counter, 1.0, right, 1, 1, 1, (2.0, 0), (table,)))
        return str(raised.value), len(kernels[made])

    return go


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would read this memory")
def test_a_kernel_takes_every_layout_that_its_kind_promises(checked: Any) -> None:
    q, table = torch.zeros(3, 2, 64, 64, dtype=torch.bfloat16), torch.zeros(2, 64)
    queries = [q, q[1:2], q[:, 1:], q[:, :, 5:6], torch.zeros(3, 64, 2, 64, dtype=torch.bfloat16).transpose(1, 2)]
    queries += [q.as_strided((1, 2, 64, 64), (3, 4096, 64, 1)), q.clone().requires_grad_()]
    for x in queries:
        said, kernels = checked(x, table)
        assert ACCEPTED in said and kernels == 1, (x.shape, x.stride(), said)
    for t in (torch.zeros(2, 6)[:, :1], torch.zeros(6, 2).T[:, :1], torch.zeros(2, 65)[:, 1:]):
        said, kernels = checked(q, t)
        assert ACCEPTED in said and kernels == 1, (t.shape, t.stride(), said)
    for t in (torch.zeros(64, 2).T, torch.zeros(2, 1).expand(2, 64), torch.zeros(2, 128)[:, ::2]):
        said, kernels = checked(q, t)
        assert ACCEPTED in said and kernels == 2, (t.shape, t.stride(), said)


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would read this memory")
def test_a_kernel_refuses_what_it_was_not_made_for(checked: Any) -> None:
    wide, table = torch.zeros(3, 2, 64, 72, dtype=torch.bfloat16), torch.zeros(2, 64)
    for q, words in ((wide[..., 1:65], "alignment=16"), (torch.zeros(3, 2, 64, 65, dtype=torch.bfloat16)[..., :64], "divisible by 8")):
        assert words in checked(q, table)[0]
    assert "int32 range" in checked(wide[..., :64], table, right=2**40)[0]


def test_launches_in_graphs_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones that were cleared before, as long as there are any, and whose memory stays; calls outside share that of their stream, and make
    new ones."""
    device, stream, is_capturing, zeros, made = torch.device("cuda", 0), [7], [False], torch.zeros, []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: made.append(size) or zeros(*size, dtype=dtype, device="cpu"))
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: is_capturing[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    monkeypatch.setattr(api, "_SPARES", 4)
    for name, empty in (("_counters", {}), ("_spares", defaultdict(list)), ("_cleared", [])):
        monkeypatch.setattr(api, name, empty)
    first = api.counter_of(device)
    stream[0] = 8
    second = api.counter_of(device)
    assert api.counter_of(device) is second and made == [(4, 2)]
    of_graphs = []
    for cleared_inside in (0, 1):
        is_capturing[0] = True
        of_graphs += [api.counter_of(device).data_ptr() for _ in range(2 + 2 * cleared_inside)]
        assert made[-1] == (4, 2)
        api.counter_of(device)
        assert made[-1] == (2,)  # none is left: this one is cleared at every replay
        is_capturing[0] = False
        assert api.counter_of(device) is second and made[-1] == (4, 2)
    assert len({first.data_ptr(), second.data_ptr(), *of_graphs}) == 8
    kept = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in api._cleared]
    assert all(any(at in memory for memory in kept) for at in of_graphs)


def test_a_graph_s_counter_outlives_a_recorded_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is recorded while a graph captures it is replayed later with its stream's counter."""
    device, noted = torch.device("cuda", 0), []
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    monkeypatch.setattr(api, "_spares", defaultdict(list, {0: [torch.zeros(2, dtype=torch.int32, device="cpu")]}))
    monkeypatch.setattr(api, "active_recorder", lambda: SimpleNamespace(outlives=lambda tensor, make: noted.append(tensor)))
    found = api.counter_of(device)
    assert noted[0] is found
