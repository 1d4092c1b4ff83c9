"""``python -m benchmarks.context_parallel``: attention of one sequence over all GPUs of a host, beside one GPU and beside ways by hand.

Each rank is a process. In a round every contestant runs once, in turn, the whole call on each GPU alone among them, so that all meet the
same clocks; times are medians over rounds of the slowest rank. efficiency: the time of one GPU / (ranks x time). err: the relative
difference of out and the gradients from one GPU's, on the rows of a rank.

``--alone``: one GPU plays the ranks, one after the other. No message is sent, noise is written where it would arrive: what is left is the
efficiency of a rank's own work, its host's included. Times are those of calls in a row, ``start`` that of one on an idle GPU; MiB is the
peak of a pass beyond its inputs.

Contestants: a plan (``anyattn.distributed``), and one that sends heads; Ulysses by hand, which exchanges heads for rows and needs as many
K/V heads as ranks; a zigzag gather by hand, in which each rank has a front and a back piece and gathers all keys.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import anyattn
from anyattn import distributed as ad
from anyattn import masks, scores
from anyattn.testing.harness import machine

Passes = tuple[Callable[..., Tensor], list[Tensor], Tensor]  # the call, its q, k, v, and the gradient of its result


class Setting(NamedTuple):
    """Of a run. window: keys of the window; documents: their number."""

    heads: tuple[int, int] = (16, 4)
    head_dim: int = 128
    window: int = 4096
    documents: int = 12
    hang: float = 60.0
    rounds: int = 9


class Rank(NamedTuple):
    """This process: its device, the group's mesh, and its place in it."""

    device: torch.device
    mesh: Any
    rank: int
    size: int


def mods_of(name: str, length: int, setting: Setting, device: torch.device) -> tuple[Callable, Callable | None]:
    """The mask and the score of a case."""
    if name == "window":
        return masks.sliding_window(min(setting.window, length // 8) - 1, 0), None
    if name == "documents":
        edges = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0), device="cpu")[: setting.documents - 1].sort()[0] + 1
        ids = torch.searchsorted(edges, torch.arange(length, device="cpu"), right=True).to(torch.int32).to(device)
        return masks.causal() & masks.document(ids), None
    slopes = (2.0 ** (-8.0 * torch.arange(1, setting.heads[0] + 1, device="cpu") / setting.heads[0])).to(device)
    return masks.causal(), scores.alibi(slopes) if name == "alibi" else None


CASES = ("causal", "documents", "window", "alibi")


# ---- contestants: each gets the whole tensors q, k, v and dout, and returns its passes on this rank's part


def one_gpu(rank: Rank, tensors: list[Tensor], mask: Any, score: Any) -> Passes:
    q, k, v, dout = tensors
    return (lambda q, k, v: anyattn.flex_attention(q, k, v, score, mask, enable_gqa=True)), [q, k, v], dout


def plan_of(rank: Rank, mask: Any, q: Tensor, k: Tensor, transport: str) -> Any:
    return ad.plan(mask, rank.mesh, heads=(q.shape[1], k.shape[1]), head_dim=q.shape[3], transport=transport)


def planned(rank: Rank, tensors: list[Tensor], mask: Any, score: Any, transport: str) -> Passes:
    q, k, v, dout = tensors
    plan = plan_of(rank, mask, q, k, transport)
    *local, dout = plan.shard(q, k, v, dout, dim=2)
    return (lambda q, k, v: anyattn.flex_attention(q, k, v, score, plan.mask, enable_gqa=True)), local, dout


class _Swapped(torch.autograd.Function):
    """Rows of all heads (B, H, S / P, D) for all rows of some heads (B, H / P, S, D), or back; its gradient is the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, to_heads: bool) -> Tensor:  # type: ignore[override]
        ctx.size, ctx.to_heads = size, to_heads
        cut, joined = (1, 2) if to_heads else (2, 1)
        sent = torch.stack(x.chunk(size, cut)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Swapped.apply(grad, ctx.size, not ctx.to_heads), None, None


def ulysses(rank: Rank, tensors: list[Tensor], mask: Any, score: Any) -> Passes:
    heads = tensors[0].shape[1] // rank.size
    first = rank.rank * heads

    def of_all_heads(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score(s, b, h + first, i, j)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = [_Swapped.apply(t, rank.size, True) for t in (q, k, v)]
        out = anyattn.flex_attention(*whole, None if score is None else of_all_heads, mask, enable_gqa=True)
        return _Swapped.apply(out, rank.size, False)

    *local, dout = (t.chunk(rank.size, 2)[rank.rank].contiguous() for t in tensors)
    return call, local, dout


class _Gathered(torch.autograd.Function):
    """All keys (B, H, S, D) from a rank's (B, H, S / P, D). order: positions, rank after rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, size: int) -> Tensor:  # type: ignore[override]
        ctx.order, ctx.size = order, size
        mine = x.movedim(2, 0).contiguous()
        parts = mine.new_empty(mine.shape[0] * size, *mine.shape[1:])
        dist.all_gather_into_tensor(parts, mine)
        whole = torch.empty_like(parts)
        whole[order] = parts
        return whole.movedim(0, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        parts = grad.movedim(2, 0)[ctx.order].contiguous()
        mine = parts.new_empty(parts.shape[0] // ctx.size, *parts.shape[1:])
        dist.reduce_scatter_tensor(mine, parts)
        return mine.movedim(0, 2), None, None


def zigzag(rank: Rank, tensors: list[Tensor], mask: Any, score: Any) -> Passes:
    length, size = tensors[0].shape[2], rank.size
    pieces = torch.arange(length, device=rank.device).chunk(2 * size)
    rows = [torch.cat([pieces[r], pieces[2 * size - 1 - r]]) for r in range(size)]
    order, mine, half = torch.cat(rows), rows[rank.rank], length // (2 * size)
    first, second = int(mine[0]), int(mine[half]) - half

    def at(i: Any) -> Any:
        return torch.where(i >= half, i + second, i + first)

    whole = mask.mask_mod
    local_mask = anyattn.create_block_mask(
        lambda b, h, i, j: whole(b, h, at(i), j), None, None, 2 * half, length, device=rank.device
    )  # fmt: skip

    def of_rows(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score(s, b, h, at(i), j)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = [_Gathered.apply(t, order, size) for t in (k, v)]
        return anyattn.flex_attention(q, *keys, None if score is None else of_rows, local_mask, enable_gqa=True)

    *local, dout = (t[:, :, mine].contiguous() for t in tensors)
    return call, local, dout


PLANS = {"anyattn.distributed": "auto", "anyattn, heads": "heads"}
CONTESTANTS: dict[str, Callable[..., Passes]] = {
    "one GPU": one_gpu,
    **{name: partial(planned, transport=transport) for name, transport in PLANS.items()},
    "Ulysses by hand": ulysses,
    "zigzag gather by hand": zigzag,
}


# ---- a rank


def _rank(index: int, size: int, device: str, lengths: list[int], chosen: tuple[str, str], setting: Setting, folder: str) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    where = torch.device(device, index) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(index)
    else:
        torch.set_num_threads(1)
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=index, world_size=size)
    rank = Rank(where, init_device_mesh(device, (size,)), index, size)
    for length in lengths:
        for name in CASES:
            if re.search(chosen[0], name):
                found = _case(rank, name, length, chosen[1], setting)
                if index == 0:
                    with open(f"{folder}/results", "a") as file:
                        file.write(json.dumps(found) + "\n")
                    print("\n".join(_lines(found, size)), flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()


def _case(rank: Rank, name: str, length: int, who: str, setting: Setting) -> dict[str, Any]:
    """The times of all contestants, in ms, and their differences from one GPU."""
    faulthandler.dump_traceback_later(setting.hang, exit=True)
    dtype = torch.bfloat16 if rank.device.type == "cuda" else torch.float32
    tensors, mask, score = _inputs(rank, name, length, dtype, setting)
    passes = {n: make(rank, tensors, mask, score) for n, make in CONTESTANTS.items() if n == "one GPU" or re.search(who, n)}
    runs: dict[str, Callable[[], list[Tensor]]] = {}
    for contestant, (call, local, dout) in passes.items():
        runs[f"{contestant}|forward"], runs[f"{contestant}|both"] = _forward_and_both(call, local, dout)
    want, errors = [], {}
    for run, call in runs.items():
        if run.endswith("both"):
            faulthandler.dump_traceback_later(setting.hang, exit=True)
            got = call()
            want = want or [t.detach() for t in got]
            errors[run.split("|")[0]] = _difference(rank, run, got, want, mask)
    del want
    times: dict[str, list[float]] = {run: [] for run in runs}
    for _ in range(setting.rounds):
        faulthandler.dump_traceback_later(setting.hang, exit=True)
        for run, call in runs.items():
            times[run].append(_time(rank, call))
    return {"case": name, "length": length, "ms": {run: median(t[1:] or t) for run, t in times.items()}, "error": errors}


def _inputs(rank: Rank, name: str, length: int, dtype: torch.dtype, setting: Setting) -> tuple[list[Tensor], Any, Callable | None]:
    """q, k, v and dout of the whole sequence, and the block mask and the score of a case."""
    g = torch.Generator(rank.device).manual_seed(1)
    heads = (setting.heads[0], setting.heads[1], setting.heads[1], setting.heads[0])
    tensors = [torch.randn(1, n, length, setting.head_dim, device=rank.device, dtype=dtype, generator=g) for n in heads]
    mod, score = mods_of(name, length, setting, rank.device)
    mask = anyattn.create_block_mask(mod, None, None, length, length, device=rank.device)
    return tensors, mask, score


def _forward_and_both(call: Callable[..., Tensor], local: list[Tensor], dout: Tensor) -> tuple[Callable[[], list[Tensor]], ...]:
    """What computes [out], and what computes out and the gradients."""
    leaves = [t.detach().requires_grad_() for t in local]

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [call(*local)]

    def both() -> list[Tensor]:
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    return forward, both


def _difference(rank: Rank, run: str, got: list[Tensor], want: list[Tensor], mask: Any) -> float:
    """The greatest relative difference of a plan's out and gradients from one GPU's, over the ranks; 0 for others."""
    transport = PLANS.get(run.split("|")[0])
    if transport is None:
        return 0.0
    plan = plan_of(rank, mask, want[0], want[2], transport)
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        rows = plan.shard(b, dim=2).float()
        worst = max(worst, float((a.detach().float() - rows).norm() / rows.norm()))
    return _greatest(rank, worst)


def _time(rank: Rank, call: Callable[[], Any]) -> float:
    """ms of one call by the slowest rank."""
    dist.barrier()
    return _greatest(rank, _stretch(rank, call, 1))


def _greatest(rank: Rank, number: float) -> float:
    t = torch.tensor([number], device=rank.device, dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def _lines(case: dict[str, Any], ranks: int) -> Iterator[str]:
    """A line of the table for each contestant."""
    ms = case["ms"]
    for contestant in dict.fromkeys(run.split("|")[0] for run in ms):
        cells = []
        for which in ("forward", "both"):
            share = ms[f"one GPU|{which}"] / ((1 if contestant == "one GPU" else ranks) * ms[f"{contestant}|{which}"])
            cells.append(f"{ms[f'{contestant}|{which}']:9.3f} {share:6.3f}")
        yield f"{case['case']:10} {case['length']:7} {contestant:22} {' '.join(cells)} {case['error'][contestant]:8.1e}"


# ---- a rank alone


class _Nothing:
    """The work of a message that is not sent."""

    def wait(self) -> None:
        pass


def _silent(channel: Any) -> None:
    def exchange(sent: Tensor, sent_sizes: Any, received: Tensor, received_sizes: Any) -> _Nothing:
        (received if received.is_floating_point() else received.view(torch.bfloat16)).normal_()
        return _Nothing()

    channel.exchange, channel.finish, channel.agree = exchange, lambda work, what: work.wait(), lambda *told: None


def _alone(_: int, index: int, size: int, device: str, lengths: list[int], only: str, setting: Setting, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    from anyattn.distributed.channel import channel_of

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    dist.init_process_group("fake", store=dist.HashStore(), rank=index, world_size=size)
    rank = Rank(where, init_device_mesh(device, (size,)), index, size)
    _silent(channel_of(rank.mesh.get_group()))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for length in lengths:
        for name in CASES:
            if re.search(only, name):
                faulthandler.dump_traceback_later(setting.hang, exit=True)
                found = {"case": name, "length": length, "rank": index, **_alone_in(rank, name, length, dtype, setting)}
                with open(f"{folder}/results", "a") as file:
                    file.write(json.dumps(found) + "\n")


def _alone_in(rank: Rank, name: str, length: int, dtype: torch.dtype, setting: Setting) -> dict[str, Any]:
    """ms of calls in a row and of one on an idle GPU, and the peak MiB, of one GPU and of this rank's part, by pass."""
    tensors, mask, score = _inputs(rank, name, length, dtype, setting)
    runs: dict[str, Callable[[], list[Tensor]]] = {}
    for who in ("one GPU", *PLANS):
        call, local, dout = CONTESTANTS[who](rank, tensors, mask, score)
        runs[f"{who}|forward"], runs[f"{who}|both"] = _forward_and_both(call, local, dout)
    peaks, times = {}, {run: ([], []) for run in runs}  # type: ignore[var-annotated]
    for run, do in runs.items():
        do()
        if rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            do()
            peaks[run] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _ in range(setting.rounds):
        for run, do in runs.items():
            faulthandler.dump_traceback_later(setting.hang, exit=True)
            started = _stretch(rank, do, 1)
            times[run][0].append(started)
            times[run][1].append(_stretch(rank, do, max(2, min(40, int(80 / started)))))
    faulthandler.cancel_dump_traceback_later()
    return {run: {"ms": median(t[1]), "start": median(t[0]), "MiB": peaks.get(run, 0.0)} for run, t in times.items()}


def _stretch(rank: Rank, call: Callable[[], Any], count: int) -> float:
    """ms of a call, of ``count`` in a row that begin on an idle GPU."""
    if rank.device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return 1e3 * (time.perf_counter() - start) / count
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def _lines_alone(found: list[dict[str, Any]], ranks: int) -> Iterator[str]:
    """A line for each case, plan and pass: the slowest rank by each measure."""
    for name, length in dict.fromkeys((each["case"], each["length"]) for each in found):
        parts = [each for each in found if (each["case"], each["length"]) == (name, length)]
        for plan, which in itertools.product(PLANS, ("forward", "both")):
            one, mine = ([each[f"{who}|{which}"] for each in parts] for who in ("one GPU", plan))
            cells = []
            for measure in ("ms", "start"):
                shares = [a[measure] / (ranks * b[measure]) for a, b in zip(one, mine, strict=True)]
                cells.append(f"{one[0][measure]:9.3f} {max(b[measure] for b in mine):9.3f} {min(shares):6.3f}")
            yield f"{name:10} {length:7} {plan:19} {which:8} {' '.join(cells)} {max(b['MiB'] for b in mine):9.1f}"


# ---- the command


@click.command(context_settings={"show_default": True})
@click.option("--S", "lengths", default="65536,131072", help="Lengths of the sequence.")
@click.option("--ranks", default=max(torch.cuda.device_count(), 2), type=click.IntRange(2), help="Processes; on a GPU each has its own.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=click.Choice(["cuda", "cpu"]))
@click.option("--only", default="", help="Only cases in whose name this regular expression finds something.")
@click.option("--who", default="", help="Only contestants in whose name it does; one GPU always runs.")
@click.option("--rounds", default=9, type=click.IntRange(2))
@click.option("--alone", is_flag=True, help="One GPU plays the ranks, without messages.")
@click.option("--hang", default=60.0, help="A step that takes longer is a hang; the processes are ended.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(lengths: str, ranks: int, device: str, only: str, who: str, rounds: int, alone: bool, hang: float, out: Path | None) -> None:
    """Attention over all GPUs of this host."""
    setting = Setting(hang=hang, rounds=rounds)
    if alone:
        click.echo(
            f"{'case':10} {'S':>7} {'':19} {'pass':8} {'one GPU':>9} {'rank':>9} {'eff':>6} {'start':>9} {'rank':>9} {'eff':>6} {'MiB':>9}"
        )
    else:
        click.echo(f"{'case':10} {'S':>7} {'':22} {'forward':>9} {'eff':>6} {'both':>9} {'eff':>6} {'err':>8}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(ranks if alone else 0):
                mp.spawn(_alone, (index, ranks, device, [int(n) for n in lengths.split(",")], only, setting, folder))
            if not alone:
                mp.spawn(_rank, (ranks, device, [int(n) for n in lengths.split(",")], (only, who), setting, folder), nprocs=ranks)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            click.echo(f"a rank has ended: {str(error).strip().splitlines()[-1]}")
        path = Path(folder, "results")
        found: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if alone:
        click.echo("\n".join(_lines_alone(found, ranks)))
    if out is not None:
        card = torch.cuda.get_device_name() if device == "cuda" else ""
        about = machine.describe(f"python -m benchmarks.context_parallel --S {lengths} --ranks {ranks}{' --alone' * alone}") | {
            "card": card
        }
        out.write_text(json.dumps({"about": about, "results": found}, indent=1))


if __name__ == "__main__":
    main()
