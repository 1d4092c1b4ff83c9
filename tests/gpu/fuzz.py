"""Random mods on a GPU: ``python -m tests.gpu.fuzz`` (``make fuzz-gpu``). Masks are compared exactly, scores with gradients by the budget.

Seed n stands for one mod (``tests.support.fuzz.written_mods``), a third of them scores, in bfloat16, float16 (Hopper's kernels, where there
are such) and float32 (Triton's), which is called with ``DRAWS`` sets of captured values and sizes, and each call twice: both must be the
same bits. The mod is evaluated for the comparison by calling it with torch's index tensors on the CPU.

FUZZ: number of mods (30,000). SHARE: ``i/n``, the part of them that this run takes. GPU_JOBS: processes at once. LIMIT: the longest time
in seconds.
A failure prints its seed; ``python -m tests.gpu.fuzz SEED`` repeats it alone. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import math
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import torch
from torch import Tensor

import anyattn
from anyattn import oracle
from anyattn.errors import ModError
from anyattn.testing import budget
from anyattn.testing.rounding import later
from tests.support.fuzz.written_mods import Sizes, Writer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAWS = 4
EACH = 12  # mods of one process: how processes end is tested too
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUERIES, KEYS = (1, 5, 16, 33, 64, 100, 127, 130, 200, 257), (1, 7, 31, 64, 100, 128, 130, 200, 256)
BLOCKS = (16, 31, 32, 48, 64, 100, 128, (64, 128), (128, 32), (32, 31), (64, 31), (127, 200), (1, 5))
HANG = 180  # seconds of one mod, compiling included


class Skipped(Exception):
    """The mod has no defined answer: torch refuses it, or a value is not finite."""


class Failed(AssertionError):
    """A wrong result."""


def on_device(values: list[int | Tensor]) -> list[Any]:
    return [v.detach().to(DEVICE).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values]


def sizes_of(random: Random) -> Sizes:
    (b, h), q = random.choice(((1, 1), (1, 2), (2, 1), (2, 3))), random.choice(QUERIES)
    return Sizes(b, h, q, min(q, 256) if random.random() < 0.4 else random.choice(KEYS))


def visible(mod: Any, sizes: Sizes) -> Tensor:
    """(B, H, Q, K) on the CPU, by the mod itself."""
    indices = torch.meshgrid(*(torch.arange(n, device="cpu") for n in sizes), indexing="ij")
    try:
        return mod(*indices).expand(sizes)
    except (RuntimeError, IndexError) as error:
        raise Skipped("torch refuses the mod") from error


def mask(seed: int, dtype: torch.dtype) -> int:
    """Calls of one mask with queries of 0 and values that name their key: a row's output shows which keys it sees. All of them have one
    head dimension, and so few kernels: most of a mod's time is theirs to be compiled."""
    random = Random(seed)
    writer = Writer(random, "mask", depth=random.choice((2, 3, 3, 4)))
    make, dv = writer.make(), random.choice((64, 128, 256))
    for draw in range(DRAWS):
        sizes = sizes_of(random)
        sizes = sizes._replace(k=min(sizes.k, dv))
        b, h, n_q, n_k = sizes
        values = writer.values(random, sizes)
        want = visible(make(*values), sizes)
        mod = make(*on_device(values))
        q, k = (torch.zeros(b, h, n, 32, dtype=dtype, device=DEVICE) for n in (n_q, n_k))
        v = torch.eye(n_k, dv, dtype=dtype, device=DEVICE).expand(b, h, -1, -1)
        options = {"mask_mod": mod}
        if draw % 2:
            size = random.choice(BLOCKS)
            options = {"block_mask": anyattn.create_block_mask(mod, b, h, n_q, n_k, device=DEVICE, BLOCK_SIZE=size)}
        results = [anyattn.flex_attention(q, k, v, return_lse=True, **options) for _ in range(2)]
        same_bits(results[0], results[1])
        out, lse = (t.cpu() for t in results[0])
        wrong = (out[..., :n_k] > 0) != want
        if wrong.any() or not torch.equal(lse.double().exp().round(), want.sum(-1).double()):
            raise Failed(f"{int(wrong.sum())} pairs of {sizes}, draw {draw}, {list(options)}")
    return DRAWS


def score(seed: int, dtype: torch.dtype) -> int:
    """Calls of one score mod, half of them with a mask, judged by the budget: out, lse and all gradients."""
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    d, ratio = random.choice((8, 32, 64, 72, 128)), random.choice((1, 1, 2, 3))
    dv = d if random.random() < 0.6 else random.choice((16, 64))
    writer = Writer(random, "score", depth=random.choice((1, 2, 2, 3)), has_floats=False)
    masks = Writer(random, "mask", depth=2, has_floats=False) if random.random() < 0.6 else None
    for _ in range(DRAWS // 2):
        b, kv_heads, n_q, n_k = sizes_of(random)
        sizes = Sizes(b, kv_heads * ratio, n_q, n_k)
        shapes = ((b, sizes.h, n_q, d), (b, kv_heads, n_k, d), (b, kv_heads, n_k, dv), (b, sizes.h, n_q, dv))
        *qkv, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        values = writer.values(random, sizes)
        mask_values = masks.values(random, sizes) if masks else []
        mask_mod = masks.make()(*mask_values) if masks else None
        if mask_mod is not None:
            visible(mask_mod, sizes)
        want = expected(qkv, dout, values, writer.make()(*values), mask_mod)
        results = [called(qkv, dout, values, writer, masks.make()(*on_device(mask_values)) if masks else None) for _ in range(2)]
        same_bits(*([r["out"], r["lse"]] for r in results))
        for name, got in results[0].items():
            if name.startswith("captured") and not want[name][0].any():
                continue  # what cancels exactly, as in s - s, leaves rounding errors that have no measure
            try:
                budget.check(name, got.cpu(), *want[name])
            except AssertionError as error:
                raise Failed(f"{error}; {sizes}, D {d}, Dv {dv}, mask {masks is not None}") from None
    return DRAWS // 2


def expected(qkv: list[Tensor], dout: Tensor, values: list[int | Tensor], mod: Any, mask_mod: Any) -> dict[str, tuple]:
    """For each result: by the definition in float64, by the plain formula in the inputs' dtype, a function for the noise of rounding."""
    captured = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
    mods = {"score": mod, "mask": mask_mod}
    try:
        forward = [f(*qkv, **mods) for f in (oracle.attention, oracle.same_dtype)]
        back = [f(*qkv, dout, **mods, captured=captured) for f in (oracle.gradients, oracle.same_dtype_gradients)]
    except (RuntimeError, IndexError) as error:
        raise Skipped("torch refuses the mod") from error
    noise = later(*qkv, dout, **mods, captured=captured)
    named = {
        n: (*(getattr(r, n) for r in (forward if n in ("out", "lse") else back)), noise.of(n)) for n in ("out", "lse", "dq", "dk", "dv")
    }
    for i in range(len(captured)):
        named[f"captured{i}"] = (*(r.captured[i] for r in back), noise.of_captured(i))
    found = {n: w for n, w in named.items() if all(x is not None for x in w)}
    if any(not bool((torch.isfinite(w[0]) | (w[0] == -math.inf) & (n == "lse")).all()) for n, w in found.items()):
        raise Skipped("a value is not finite")
    return found


def called(qkv: list[Tensor], dout: Tensor, values: list[int | Tensor], writer: Writer, mask_mod: Any) -> dict[str, Tensor]:
    leaves, values = [t.to(DEVICE).requires_grad_() for t in qkv], on_device(values)
    captured = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
    out, lse = anyattn.flex_attention(*leaves, writer.make()(*values), mask_mod=mask_mod, enable_gqa=True, return_lse=True)
    named = {"out": out.detach(), "lse": lse.detach()}
    if out.requires_grad:
        gradients = torch.autograd.grad(out, leaves + captured, dout.to(DEVICE), allow_unused=True)
        names = ("dq", "dk", "dv", *(f"captured{i}" for i in range(len(captured))))
        named |= {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
    return named


def same_bits(first: Any, second: Any) -> None:
    for a, b in zip(first, second, strict=True):
        if not torch.equal(a, b):
            raise Failed(f"a second call gives other bits, at {(a != b).nonzero()[:4].tolist()} of {tuple(a.shape)}")


def run(seed: int) -> tuple[str, int]:
    """(what came of seed's mod, the number of calls); prints a failure."""
    kind, dtype = ("score" if seed % 3 == 0 else "mask"), DTYPES[seed // 3 % 3]
    faulthandler.dump_traceback_later(HANG, exit=True)
    try:
        return f"{kind} {dtype}".replace("torch.", ""), (score if kind == "score" else mask)(seed, dtype)
    except Skipped as reason:
        return f"skipped: {reason}", 0
    except ModError as error:
        return f"refused: {str(error).splitlines()[0][:60]}", 0
    except Exception as error:
        text = str(error) if isinstance(error, Failed) else traceback.format_exc(limit=-3)
        writer = Writer(Random(seed), "mask", depth=Random(seed).choice((2, 3, 3, 4))) if kind == "mask" else None
        print(f"FAILED seed={seed} {kind} {dtype} {type(error).__name__}: {text[:1500]}\n{writer.source if writer else ''}", flush=True)
        return "FAILED", 0


def work(first: int, last: int, until: float) -> None:
    """Runs the seeds of one process; its last line is the counts as JSON."""
    torch.set_num_threads(1)
    mods, calls = collections.Counter[str](), collections.Counter[str]()
    for seed in range(first, last):
        if time.time() > until:
            break
        kind, count = run(seed)
        mods[kind] += 1
        calls[kind] += count
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps([mods, calls]), flush=True)


def main() -> int:
    if len(sys.argv) == 2:
        print(run(int(sys.argv[1])))
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
        for process in filter(None, pool.map(done, commands)):
            *lines, counts = (process.stdout.strip() or "no output").splitlines()
            print(*lines, sep="\n", end="\n" if lines else "")
            if process.returncode or not counts.startswith("["):
                bad += 1
                print(f"a process ended with status {process.returncode}: {counts}")
                continue
            ended += 1
            for total_of, part_of in zip((mods, calls), json.loads(counts), strict=True):
                total_of.update(part_of)
    for kind, count in mods.most_common():
        print(f"{count:6} mods, {calls[kind]:6} calls: {kind}")
    print(f"seeds {first} to {last - 1}: {sum(mods.values())} mods, {sum(calls.values())} calls, {mods['FAILED'] + bad} failed")
    print(f"{ended} processes ended with status 0, {bad} did not")
    return int(bool(mods["FAILED"] + bad))


if __name__ == "__main__":
    sys.exit(main())
