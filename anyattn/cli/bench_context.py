"""``anyattn bench --context``: the cost model of context parallelism, fitted on this machine, and its predictions beside measurements."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.block_masks import create_block_mask
from anyattn.distributed.placement import CostModel, Rates
from anyattn.flex import flex_attention
from anyattn.mods import masks

__all__ = ["Setting", "fitted", "lines"]

_WARM = 2  # calls before those that are timed
_DOCUMENTS = 12
_MESSAGES = {"cpu": (2**16, 2**22), "cuda": (2**20, 2**26)}  # bytes that a rank receives: bandwidth is what the difference takes


class Setting(NamedTuple):
    """What is measured. ranks: processes of this host, on a GPU one each; 1 measures without a group."""

    heads: tuple[int, int]
    head_dim: int
    length: int
    dtype: str
    device: str
    rounds: int
    ranks: int

    @property
    def where(self) -> torch.device:
        """The device of this process."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device(self.device)

    def costs(self, rates: Rates) -> CostModel:
        return rates.costs(self.heads, self.head_dim, self.ranks, getattr(torch, self.dtype).itemsize)


def fitted(setting: Setting) -> dict[str, Any]:
    """``rates``, ``setting``, and ``cases``: for each its predicted and measured seconds of a forward pass, by the slowest rank."""
    found = _figures(setting) if setting.ranks == 1 else _together(setting)
    return {**found, "setting": setting._asdict()}


def lines(found: dict[str, Any]) -> list[str]:
    """The report of ``fitted``."""
    rates, setting = Rates(**found["rates"]), Setting(**found["setting"])
    where = f"{setting.ranks} processes" if setting.ranks > 1 else "one process, without a group"
    numbers = [
        f"attention          {rates.flops / 1e12:10.4f} TFLOP/s",
        f"partial            {rates.partial:10.3f} of a tile, to evaluate a mask",
        f"call               {1e6 * rates.call_seconds:10.1f} us, of a further local call",
    ]
    if rates.bandwidth is not None and rates.fixed_seconds is not None:
        numbers.append(f"bandwidth          {rates.bandwidth / 1e9:10.3f} GB/s that a rank receives")
        numbers.append(f"exchange           {1e6 * rates.fixed_seconds:10.1f} us, of a call with one, beside its bytes")
    cases = [
        f"{c['case']:12} {1e3 * c['predicted']:12.3f} {1e3 * c['measured']:12.3f} {c['predicted'] / c['measured']:8.2f}"
        for c in found["cases"]
    ]
    of_heads = f"{setting.heads[0]}/{setting.heads[1]} heads of {setting.head_dim}"
    title = f"{setting.length} positions, {of_heads}, {setting.dtype}, {setting.device}, {where}"
    return [title, *numbers, f"{'forward, ms':12} {'predicted':>12} {'measured':>12} {'ratio':>8}", *cases]


@torch.no_grad()
def _figures(setting: Setting, mesh: Any = None) -> dict[str, Any]:
    """Rates and cases; of a rank if there is a mesh. The ranks find the same rates, those of the slowest one, and so the same plans."""
    rates = _rates_alone(setting, setting.where)
    if mesh is not None:
        slowest = Rates(-_greatest(-rates.flops, mesh), _greatest(rates.partial, mesh), _greatest(rates.call_seconds, mesh))
        rates = _rates_of_group(setting, slowest, mesh)
    return {"rates": rates._asdict(), "cases": [_case(setting, name, rates, mesh) for name in _mods(setting)]}


# ---- one process


def _tensors(setting: Setting, device: torch.device, rows: int) -> list[Tensor]:
    g = torch.Generator(device).manual_seed(0)
    heads, dtype = (setting.heads[0], setting.heads[1], setting.heads[1]), getattr(torch, setting.dtype)
    return [torch.randn(1, n, rows, setting.head_dim, device=device, generator=g).to(dtype) for n in heads]


def _seconds(call: Callable[[], Any], device: torch.device, rounds: int, meet: Callable[[], Any] = lambda: None) -> float:
    """Median of one call on an idle device. meet: before each, with other ranks."""
    found = []
    for _ in range(_WARM + rounds):
        _idle(device)
        meet()
        start = time.perf_counter()
        call()
        _idle(device)
        found.append(time.perf_counter() - start)
    return median(found[_WARM:])


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Any:
    return flex_attention(q, k, v, None, mask, enable_gqa=True)


def _rates_alone(setting: Setting, device: torch.device) -> Rates:
    """Of one process: what a pair of positions takes, a mask in a tile, and a second call."""
    length, rounds = setting.length, setting.rounds
    q, k, v = _tensors(setting, device, length)
    whole = _seconds(lambda: _attend(q, k, v), device, rounds)
    rows = [t[:, :, : length // 2] for t in (q, k, v)]
    half = _seconds(lambda: _attend(*rows), device, rounds)
    pairs = length**2 - (length // 2) ** 2
    per_pair = (whole - half) / pairs if whole > half else whole / length**2
    ids = (torch.arange(length, device=device) * 7919) % 2  # every tile has pairs of both kinds
    in_tiles = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, length, length, device)
    masked = _seconds(lambda: _attend(q, k, v, in_tiles), device, rounds)

    def twice() -> None:
        for part in q.split(-(-length // 2), 2):
            _attend(part, k, v)

    two = _seconds(twice, device, rounds)
    flops = 4 * setting.head_dim * setting.heads[0] / per_pair
    return Rates(flops, max(masked / whole - 1, 0.0), max(two - whole, 0.0))


def _mods(setting: Setting, device: torch.device | str = "cpu") -> dict[str, Any]:
    edges = torch.randperm(setting.length - 1, generator=torch.Generator().manual_seed(0), device="cpu")[: _DOCUMENTS - 1].sort()[0] + 1
    ids = torch.searchsorted(edges, torch.arange(setting.length, device="cpu"), right=True).to(device)
    window = masks.sliding_window(max(setting.length // 16, 1), 0)
    return {"causal": masks.causal(), "window": window, "documents": masks.causal() & masks.document(ids)}


def _case(setting: Setting, name: str, rates: Rates, mesh: Any = None) -> dict[str, Any]:
    """The predicted and the measured time of one mask, of one process or, with a mesh, of its slowest rank."""
    from anyattn import distributed as ad

    device = setting.where
    mod = _mods(setting, device)[name]
    where: dict[str, Any] = {"ranks": 1} if mesh is None else {"where": mesh, "transport": "keys"}
    plan = ad.plan(
        mod, S=setting.length, device=device, heads=setting.heads, head_dim=setting.head_dim, costs=setting.costs(rates), **where
    )
    q, k, v = _tensors(setting, device, len(plan.positions))
    seconds = _seconds(lambda: _attend(q, k, v, plan.mask), device, setting.rounds, _meeting(mesh))
    return {"case": name, "predicted": plan.stats.seconds, "measured": _greatest(seconds, mesh)}


# ---- a group


def _together(setting: Setting) -> dict[str, Any]:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (setting, folder), nprocs=setting.ranks)
        return json.loads(Path(folder, "found").read_text())  # type: ignore[no-any-return]


def _rank(index: int, setting: Setting, folder: str) -> None:
    """A process of the group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if setting.device == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(index)
    else:
        torch.set_num_threads(max(torch.get_num_threads() // setting.ranks, 1))
    backend = "nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=index, world_size=setting.ranks)
    mesh = init_device_mesh(setting.device, (setting.ranks,))
    found = _figures(setting, mesh)
    if index == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo has threads that abort an ordinary exit, rarely: "terminate called without an active exception"


def _rates_of_group(setting: Setting, rates: Rates, mesh: Any) -> Rates:
    """The rates with those of messages: bytes a second, and what a call with an exchange of few keys takes longer than one without."""
    from anyattn import distributed as ad
    from anyattn.distributed.channel import channel_of

    device = setting.where
    channel, meet, ranks = channel_of(mesh.get_group()), _meeting(mesh), setting.ranks
    seconds = []
    for size in _MESSAGES[setting.device]:
        each = [0 if r == channel.rank else size // (ranks - 1) for r in range(ranks)]
        sent, received = (torch.zeros(sum(each), dtype=torch.uint8, device=device) for _ in range(2))

        def exchange(sent: Tensor = sent, received: Tensor = received, each: list[int] = each) -> None:
            channel.finish(channel.exchange(sent, each, received, each), "a message of anyattn bench")

        seconds.append(_greatest(_seconds(exchange, device, setting.rounds, meet), mesh))
    small, large = _MESSAGES[setting.device]
    bandwidth = (large - small) / (seconds[1] - seconds[0]) if seconds[1] > seconds[0] else large / seconds[1]
    near = masks.sliding_window(1, 0)  # one block of keys travels
    plan = ad.plan(near, mesh, S=setting.length, device=device, overlap=False)
    q, k, v = _tensors(setting, device, len(plan.positions))
    alone = create_block_mask(near, None, None, len(plan.positions), len(plan.positions), device)
    with_exchange = _greatest(_seconds(lambda: _attend(q, k, v, plan.mask), device, setting.rounds, meet), mesh)
    without = _greatest(_seconds(lambda: _attend(q, k, v, alone), device, setting.rounds, meet), mesh)
    return rates._replace(bandwidth=bandwidth, fixed_seconds=max(with_exchange - without, 0.0))


def _meeting(mesh: Any) -> Callable[[], Any]:
    import torch.distributed as dist

    return (lambda: None) if mesh is None else (lambda: dist.barrier(mesh.get_group()))


def _greatest(seconds: float, mesh: Any) -> float:
    if mesh is None:
        return seconds
    import torch.distributed as dist

    t = torch.tensor([seconds], dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(t, dist.ReduceOp.MAX, mesh.get_group())
    return float(t)
