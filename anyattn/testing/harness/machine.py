"""Description of the machine, versions and commit of a measurement."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from anyattn import __version__

__all__ = ["describe"]

_ROOT = Path(__file__).resolve().parents[3]


def describe(command: str) -> dict[str, Any]:
    """The machine, the versions and the commit of figures. command: the command that produced them."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "commit": _commit(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": _has_bf16(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }


def _commit() -> str:
    """The short hash, with "+" if tracked files are modified; for an installed package outside a repository, its version."""
    if not (_ROOT / ".git").exists():
        return f"version {__version__}"

    def git(*args: str) -> str:
        try:
            done = subprocess.run(["git", *args], capture_output=True, text=True, cwd=_ROOT)
        except FileNotFoundError:  # a copy of the files on a machine without git
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "-uno") else "")


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _cpu_name() -> str:
    names = [line.split(":", 1)[1].strip() for line in _cpu_info().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _has_bf16() -> bool:
    return "avx512_bf16" in _cpu_info() or "amx_bf16" in _cpu_info()
