"""``anyattn doctor``: versions, backends with the reasons against unavailable ones, and a few results checked against float64."""

from __future__ import annotations

import importlib.metadata
import platform
import time

import click
import torch
from rich.console import Console
from rich.table import Table

import anyattn
from anyattn import disk_cache, gallery
from anyattn.backends.hopper.compile import build
from anyattn.cli import selfcheck
from anyattn.cli.judge import shares
from anyattn.tensors.tested_versions import TESTED, is_newer, range_of

__all__ = ["command"]

_PACKAGES = ("torch", "numpy", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "matplotlib")
# A mask by ranges, captured ids, a score mod with a table, and a custom mod: one per code path.
_CHECKED = ("causal", "document", "t5_bias", "own")


def _version(package: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    if package not in TESTED:
        return version
    return f"{version} ({'newer than ' if is_newer(package, version) else ''}tested: {range_of(package)})"


@click.command("doctor")
def command() -> int:
    """Check versions, and every backend of every device by real calls, forward, backward and decode, against float64; ends with status 1
    if a result is wrong or a call fails. Kernels that this machine has not compiled yet are compiled, which takes seconds.
    """
    console, places = Console(), selfcheck.places()
    machine = Table(show_header=False, box=None, pad_edge=False)
    machine.add_row("anyattn", anyattn.__version__)
    machine.add_row("python", platform.python_version())
    for package in _PACKAGES:
        machine.add_row(package, _version(package))
    machine.add_row("devices", ", ".join(place.name for place in places))
    machine.add_row("threads", str(torch.get_num_threads()))
    for place in places:
        for name, why in place.backends.items():
            machine.add_row(f"{place.device} {name}", "available" if why is None else f"unavailable: {why}")
    machine.add_row("kernel cache", _cache())
    machine.add_row("kernel launches", _launches())
    console.print(machine, highlight=False)
    started = time.perf_counter()
    worst = {f"{name} {dtype}": _worst(name, dtype) for name in _CHECKED for dtype in (torch.float32, torch.bfloat16)}
    wrong = [f"{name} uses {share:.3g} of its error budget" for name, share in worst.items() if not share <= 1]
    for outcome in (outcome for place in places for outcome in selfcheck.outcomes(place)):
        console.print(str(outcome), highlight=False, soft_wrap=True, markup=False)
        worst[str(outcome)] = outcome.share
        if not outcome.is_right:
            wrong.append(f"{outcome.place.device} {outcome.backend}, {outcome.call}")
    seconds = time.perf_counter() - started
    if wrong:
        console.print("[red]wrong:[/] " + "; ".join(wrong), highlight=False, soft_wrap=True)
        return 1
    console.print(
        f"[green]well[/]: {len(worst)} self-checks, at most {max(worst.values()):.0%} of the error budget used, {seconds:.1f} s",
        highlight=False,
    )
    return 0


def _launches() -> str:
    return "by tvm-ffi" if build.has_tvm_ffi() else "slow, and no kernel is kept on disk: apache-tvm-ffi is missing"


def _cache() -> str:
    if not disk_cache.is_on():
        return "off (ANYATTN_CACHE)"
    folder = disk_cache.default_folder()
    reason = disk_cache.why_not(folder)
    return str(folder) if reason is None else f"unused: {reason}"


def _worst(name: str, dtype: torch.dtype) -> float:
    mods = gallery.VARIANTS[name].mods(gallery.Setting(seqlen=192, heads=2))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 192, 32, generator=generator, device="cpu").to(dtype) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = anyattn.flex_attention(q, k, v, mods.score, mask_mod=mods.mask)
    return max(shares(mods, (q, k, v), dout, out, torch.autograd.grad(out, (q, k, v), dout)).values())
