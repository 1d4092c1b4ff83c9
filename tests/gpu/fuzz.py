"""Random mods, or random batches, on a GPU: ``python -m tests.gpu.fuzz`` (``make fuzz-gpu``). Masks are compared exactly, scores with
gradients by the budget, batches for ``deterministic="batch"`` with what a sequence alone gives, bit by bit.

Seed n stands for one mod (``tests.support.fuzz.written_mods``), a third of them scores, in bfloat16, float16 (Hopper's kernels, where there
are such) and float32 (Triton's), which is called with ``DRAWS`` sets of captured values and sizes, and each call twice: both must be the
same bits. The mod is evaluated for the comparison by calling it with torch's index tensors on the CPU. ``TOGETHER`` mods of one kind and
dtype stand side by side in one call, each for heads of its own: a mod alone costs 11 to 13 seconds of a CPU, nearly all for compiling.

With KIND=batches seed n is a batch (``tests.support.fuzz.random_batches``): ``make fuzz-gpu KIND=batches FUZZ=2000``. The batches of one
process have one option, one dtype and one pair of head dimensions (``batch_class``), for which some 50 kernels are compiled at head
dimension 64 and up to 120 at 576 and 512, as the interpreter counts them: N batches have N / 72 such classes.

FUZZ: number of mods or batches (30,000). SHARE: ``i/n``, the part of them that this run takes. GPU_JOBS: processes at once. LIMIT: the
longest time in seconds.
A failure prints its seed; ``python -m tests.gpu.fuzz SEED`` repeats it alone, with the same KIND. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import collections
import faulthandler
import itertools
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from random import Random
from typing import Any

import torch
from torch import Tensor

import anyattn
from anyattn import oracle
from anyattn.errors import ModError
from anyattn.testing import budget
from anyattn.testing.rounding import later
from anyattn.triton_tools import launch
from tests.support.batches import OPTIONS
from tests.support.fuzz import random_batches
from tests.support.fuzz.random_batches import Limits
from tests.support.fuzz.written_mods import Sizes, Writer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAWS = 4
KIND = os.environ.get("KIND") or "mods"
TOGETHER = {"mask": 8, "score": 4, "batch": 1}  # mods of one call
EACH = 72  # mods of one process: how processes end is tested too
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUERIES, KEYS = (1, 5, 16, 33, 64, 100, 127, 130, 200, 257), (1, 7, 31, 64, 100, 128, 130, 200, 256)
BLOCKS = (16, 31, 32, 48, 64, 100, 128, (64, 128), (128, 32), (32, 31), (64, 31), (127, 200), (1, 5))
HANG = 300  # seconds of one call's mods or of a batch, compiling included


class Failed(AssertionError):
    """A wrong result."""


def on_device(values: list[int | Tensor]) -> list[Any]:
    return [v.detach().to(DEVICE).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values]


def sizes_of(random: Random) -> Sizes:
    (b, h), q = random.choice(((1, 1), (1, 2), (2, 1), (2, 3))), random.choice(QUERIES)
    return Sizes(b, h, q, min(q, 256) if random.random() < 0.4 else random.choice(KEYS))


def visible(mod: Any, sizes: Sizes) -> Tensor | None:
    """(B, H, Q, K) on the CPU, by the mod itself; None if torch refuses the mod."""
    indices = torch.meshgrid(*(torch.arange(n, device="cpu") for n in sizes), indexing="ij")
    try:
        return mod(*indices).expand(sizes)
    except (RuntimeError, IndexError):
        return None


def side_by_side(mods: Sequence[Any], heads: int) -> Any:
    """One mask or score mod with the i-th mod at heads ``i * heads`` to ``(i + 1) * heads - 1``: compiled once for all of them."""

    def chosen(h: Any, before: tuple, behind: tuple) -> Any:
        result = mods[0](*before, h % heads, *behind)
        for i, mod in enumerate(mods[1:], 1):
            result = torch.where(h // heads == i, mod(*before, h % heads, *behind), result)
        return result

    if len(mods) == 1:
        return mods[0]
    if mods[0].__code__.co_argcount == 4:
        return lambda b, h, q, k: chosen(h, (b,), (q, k))
    return lambda s, b, h, q, k: chosen(h, (s, b), (q, k))


def masks(seeds: list[int], dtype: torch.dtype) -> dict[int, int]:
    """Calls of some masks side by side, with queries of 0 and values that name their key: a row's output shows which keys it sees. All of
    them have one head dimension, and so few kernels: most of a mod's time is theirs to be compiled. The result: the number of calls of
    each seed's mask, 0 if torch refuses it."""
    randoms = [Random(seed) for seed in seeds]
    writers = [Writer(random, "mask", depth=random.choice((2, 3, 3, 4))) for random in randoms]
    dv, draws = randoms[0].choice((64, 128, 256)), []
    for draw in range(DRAWS):
        sizes = sizes_of(randoms[0])
        sizes = sizes._replace(k=min(sizes.k, dv))
        values = [writer.values(random, sizes) for writer, random in zip(writers, randoms, strict=True)]
        wanted = [visible(writer.make()(*own), sizes) for writer, own in zip(writers, values, strict=True)]
        draws.append((sizes, values, wanted, randoms[0].choice(BLOCKS) if draw % 2 else None))
    usable = [i for i in range(len(seeds)) if all(wanted[i] is not None for _, _, wanted, _ in draws)]
    for draw, (sizes, values, wanted, block) in enumerate(draws if usable else ()):
        b, h, n_q, n_k = sizes
        want = torch.cat([wanted[i] for i in usable], 1)
        mod = side_by_side([writers[i].make()(*on_device(values[i])) for i in usable], h)
        h *= len(usable)
        q, k = (torch.zeros(b, h, n, 32, dtype=dtype, device=DEVICE) for n in (n_q, n_k))
        v = torch.eye(n_k, dv, dtype=dtype, device=DEVICE).expand(b, h, -1, -1)
        options = {"mask_mod": mod}
        if block is not None:
            options = {"block_mask": anyattn.create_block_mask(mod, b, h, n_q, n_k, device=DEVICE, BLOCK_SIZE=block)}
        results = [anyattn.flex_attention(q, k, v, return_lse=True, **options) for _ in range(2)]
        same_bits(results[0], results[1])
        out, lse = (t.cpu() for t in results[0])
        wrong = (out[..., :n_k] > 0) != want
        if wrong.any() or not torch.equal(lse.double().exp().round(), want.sum(-1).double()):
            raise Failed(f"{int(wrong.sum())} pairs of {sizes}, draw {draw}, {list(options)}")
    return {seed: DRAWS * (i in usable) for i, seed in enumerate(seeds)}


def scores(seeds: list[int], dtype: torch.dtype) -> dict[int, int]:
    """Calls of some score mods side by side, half of them with masks, judged by the budget: out, lse and all gradients. The result: the
    number of calls of each seed's mod, 0 if torch refuses it or a value is not finite."""
    randoms = [Random(seed) for seed in seeds]
    random, generator = randoms[0], torch.Generator().manual_seed(seeds[0])
    d, ratio = random.choice((8, 32, 64, 72, 128) * 3 + (256, 576)), random.choice((1, 1, 2, 3))
    dv = d if random.random() < 0.6 else random.choice((16, 64))
    writers = [Writer(r, "score", depth=r.choice((1, 2, 2, 3)), has_floats=False) for r in randoms]
    has_masks = random.random() < 0.6
    mask_writers = [Writer(r, "mask", depth=2, has_floats=False) for r in randoms] if has_masks else []
    draws = []
    for _ in range(DRAWS // 2):
        b, kv_heads, n_q, n_k = sizes_of(random)
        sizes = Sizes(b, kv_heads * ratio, n_q, n_k)
        n = len(seeds)
        shapes = ((b, n * sizes.h, n_q, d), (b, n * kv_heads, n_k, d), (b, n * kv_heads, n_k, dv), (b, n * sizes.h, n_q, dv))
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        own = [[t.chunk(n, 1)[i] for t in tensors] for i in range(n)]
        values, mask_values, wanted = [], [], []
        for i, r in enumerate(randoms):
            values.append(writers[i].values(r, sizes))
            mask_values.append(mask_writers[i].values(r, sizes) if has_masks else [])
            mask_mod = mask_writers[i].make()(*mask_values[i]) if has_masks else None
            refused = mask_mod is not None and visible(mask_mod, sizes) is None
            wanted.append(None if refused else expected(own[i][:3], own[i][3], values[i], writers[i].make()(*values[i]), mask_mod))
        draws.append((sizes, own, values, mask_values, wanted))
    usable = [i for i in range(len(seeds)) if all(draw[-1][i] is not None for draw in draws)]
    for sizes, own, values, mask_values, wanted in draws if usable else ():
        tensors = [torch.cat([own[i][j] for i in usable], 1) for j in range(4)]
        results = []
        for _ in range(2):
            captured = [on_device(values[i]) for i in usable]
            mods = [writers[i].make()(*those) for i, those in zip(usable, captured, strict=True)]
            mask_mods = [mask_writers[i].make()(*on_device(mask_values[i])) for i in usable] if has_masks else None
            results.append(called(tensors, side_by_side(mods, sizes.h), mask_mods and side_by_side(mask_mods, sizes.h), captured))
        same_bits(*([r["out"], r["lse"]] for r in results))
        for at, i in enumerate(usable):
            compared(results[0], wanted[i], at, len(usable), f"seed {seeds[i]}, {sizes}, D {d}, Dv {dv}, mask {has_masks}")
    return {seed: DRAWS // 2 * (i in usable) for i, seed in enumerate(seeds)}


BATCHES = Limits(lengths=(*random_batches.LENGTHS, (1000, 3000), (1000, 3000)), work=(2**30, 2**33))


def batch_class(seed: int) -> dict[str, Any]:
    """What the batches of a process have in common, so that few kernels are compiled."""
    n = seed // EACH
    dims = random_batches.DIMS[n % len(random_batches.DIMS)]
    return {
        **{"option": list(OPTIONS)[n % len(OPTIONS)], "dtype": DTYPES[(n + n // len(OPTIONS)) % len(DTYPES)], "dims": dims},
        **{"in_keys": dims == (576, 512), "stored": random_batches.STORED[n % len(random_batches.STORED)]},
        "page_sizes": ((1, 16), (64,), (3, 256), (128,))[n % 4],
    }


def batches(seeds: list[int]) -> dict[int, int]:
    """Batches in which a sequence is computed in several forms. The result: the number of computations of each seed's batch."""
    found = {}
    with random_batches.on_machines() as another:
        for seed in seeds:
            batch = random_batches.drawn(Random(seed), BATCHES, **batch_class(seed))
            random_batches.check(batch, DEVICE, another)
            found[seed] = 1 + len(batch.forms)
    return found


def compared(results: dict[str, Any], want: dict[str, tuple], at: int, count: int, text: str) -> None:
    """Judges the results of the at-th of count mods."""
    named = {name: result.chunk(count, 1)[at] for name, result in results.items() if name != "captured"}
    named |= {f"captured{j}": g for j, g in enumerate(results["captured"][at]) if g is not None} if "captured" in results else {}
    for name, got in named.items():
        if name.startswith("captured") and not want[name][0].any():
            continue  # what cancels exactly, as in s - s, leaves rounding errors that have no measure
        try:
            budget.check(name, got.cpu(), *want[name])
        except AssertionError as error:
            raise Failed(f"{error}; {text}") from None


def expected(qkv: list[Tensor], dout: Tensor, values: list[int | Tensor], mod: Any, mask_mod: Any) -> dict[str, tuple] | None:
    """For each result: by the definition in float64, by the plain formula in the inputs' dtype, a function for the noise of rounding.
    None if torch refuses the mod or a value is not finite."""
    captured = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
    mods = {"score": mod, "mask": mask_mod}
    try:
        forward = [f(*qkv, **mods) for f in (oracle.attention, oracle.same_dtype)]
        back = [f(*qkv, dout, **mods, captured=captured) for f in (oracle.gradients, oracle.same_dtype_gradients)]
    except (RuntimeError, IndexError):
        return None
    noise = later(*qkv, dout, **mods, captured=captured)
    named = {
        n: (*(getattr(r, n) for r in (forward if n in ("out", "lse") else back)), noise.of(n)) for n in ("out", "lse", "dq", "dk", "dv")
    }
    for i in range(len(captured)):
        named[f"captured{i}"] = (*(r.captured[i] for r in back), noise.of_captured(i))
    named = {n: w for n, w in named.items() if all(x is not None for x in w)}
    finite = all(bool((torch.isfinite(w[0]) | (w[0] == -math.inf) & (n == "lse")).all()) for n, w in named.items())
    return named if finite else None


def called(tensors: list[Tensor], score_mod: Any, mask_mod: Any, values: list[list[Any]]) -> dict[str, Any]:
    """out, lse and the gradients. values: on the device, those of each mod, which have their gradients as lists under "captured"."""
    *qkv, dout = tensors
    leaves = [t.to(DEVICE).requires_grad_() for t in qkv]
    captured = [[v for v in own if isinstance(v, Tensor) and v.requires_grad] for own in values]
    out, lse = anyattn.flex_attention(*leaves, score_mod, mask_mod=mask_mod, enable_gqa=True, return_lse=True)
    named: dict[str, Any] = {"out": out.detach(), "lse": lse.detach()}
    if out.requires_grad:
        wanted = leaves + [v for own in captured for v in own]
        gradients = iter(torch.autograd.grad(out, wanted, dout.to(DEVICE), allow_unused=True))
        named |= {name: g for name, g in zip(("dq", "dk", "dv"), gradients, strict=False) if g is not None}
        named["captured"] = [[next(gradients) for _ in own] for own in captured]
    return named


def same_bits(first: Any, second: Any) -> None:
    for a, b in zip(first, second, strict=True):
        if not torch.equal(a, b):
            raise Failed(f"a second call gives other bits, at {(a != b).nonzero()[:4].tolist()} of {tuple(a.shape)}")


def run(seeds: list[int]) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """The numbers of mods and of calls, by what came of them. All seeds have one kind and dtype. What fails side by side or is refused is
    run alone; a failure is printed."""
    kind, dtype = kind_of(seeds[0])
    mods, calls = collections.Counter[str](), collections.Counter[str]()
    faulthandler.dump_traceback_later(HANG, exit=True)
    try:
        counts = batches(seeds) if kind == "batch" else (scores if kind == "score" else masks)(seeds, dtype)
        for count in counts.values():
            name = (
                f"{kind} {batch_class(seeds[0])['option'] if kind == 'batch' else dtype}".replace("torch.", "")
                if count
                else "skipped: torch refuses the mod, or a value is not finite"
            )
            mods[name] += 1
            calls[name] += count
        return mods, calls
    except ModError as error:
        if len(seeds) == 1:
            return collections.Counter([f"refused: {str(error).splitlines()[0][:60]}"]), calls
    except Exception as error:
        text = str(error) if isinstance(error, Failed) else traceback.format_exc(limit=-3)
        writer = (
            Writer(Random(seeds[0]), "mask", depth=Random(seeds[0]).choice((2, 3, 3, 4))) if kind == "mask" and len(seeds) == 1 else None
        )
        print(f"FAILED seeds={seeds} {kind} {dtype} {type(error).__name__}: {text[:1500]}\n{writer.source if writer else ''}", flush=True)
        mods["FAILED"] += 1
        if len(seeds) == 1:
            return mods, calls
    for seed in seeds:
        for total, part in zip((mods, calls), run([seed]), strict=True):
            total.update(part)
    return mods, calls


def kind_of(seed: int) -> tuple[str, torch.dtype]:
    if KIND == "batches":
        return "batch", batch_class(seed)["dtype"]
    return ("score" if seed % 3 == 0 else "mask"), DTYPES[seed // 3 % 3]


def work(first: int, last: int, until: float) -> None:
    """Runs the seeds of one process; its last line is the counts as JSON."""
    torch.set_num_threads(1)
    mods, calls = collections.Counter[str](), collections.Counter[str]()
    seeds = sorted(range(first, last), key=lambda seed: (*map(str, kind_of(seed)), seed))
    for (kind, _), own in itertools.groupby(seeds, kind_of):
        while group := list(itertools.islice(own, TOGETHER[kind])):
            if time.time() > until:
                break
            for total, part in zip((mods, calls), run(group), strict=True):
                total.update(part)
            faulthandler.cancel_dump_traceback_later()
    calls["kernels"] += len(launch._ready)
    print(json.dumps([mods, calls]), flush=True)


def main() -> int:
    if len(sys.argv) == 2:
        print(*run([int(sys.argv[1])]))
        return 0
    if len(sys.argv) == 4:
        work(*map(int, sys.argv[1:3]), float(sys.argv[3]))
        return 0
    total, jobs = int(os.environ.get("FUZZ", "30000")), int(os.environ.get("GPU_JOBS", "16"))
    part, parts = map(int, os.environ.get("SHARE", "1/1").split("/"))
    first, last = total * (part - 1) // parts, total * part // parts
    until = time.time() + float(os.environ.get("LIMIT", "1e9"))
    commands = [[sys.executable, "-m", "tests.gpu.fuzz", *map(str, (at, min(at + EACH, last), until))] for at in range(first, last, EACH)]

    def done(command: list[str]) -> subprocess.CompletedProcess[str] | None:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) if time.time() < until else None

    mods, calls, bad, ended = collections.Counter[str](), collections.Counter[str](), 0, 0
    with ThreadPoolExecutor(jobs) as pool:
        for process in (running.result() for running in as_completed([pool.submit(done, command) for command in commands])):
            if process is None:
                continue
            *lines, counts = (process.stdout.strip() or "no output").splitlines()
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
            if process.returncode or not counts.startswith("["):
                bad += 1
                print(
                    f"the process of seeds {process.args[3]} to {process.args[4]} ended with status {process.returncode}: {counts}",
                    flush=True,
                )
                continue
            ended += 1
            for total_of, part_of in zip((mods, calls), json.loads(counts), strict=True):
                total_of.update(part_of)
    kernels = calls.pop("kernels", 0)
    for kind, count in mods.most_common():
        print(f"{count:6} {KIND}, {calls[kind]:6} calls: {kind}")
    print(f"seeds {first} to {last - 1}: {sum(mods.values())} {KIND}, {sum(calls.values())} calls, {mods['FAILED'] + bad} failed")
    print(f"{kernels} Triton kernels launched, counted for each process")
    print(f"{ended} processes ended with status 0, {bad} did not")
    return int(bool(mods["FAILED"] + bad))


if __name__ == "__main__":
    sys.exit(main())
