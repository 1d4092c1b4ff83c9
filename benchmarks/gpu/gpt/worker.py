"""``python -m benchmarks.gpu.gpt.worker``: the process of one contestant, which reads questions as JSON lines and answers each with one."""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from anyattn.testing.harness.peers import Unavailable
from benchmarks.gpu.gpt.model import SIZES, Size
from benchmarks.gpu.gpt.training import Training
from benchmarks.process import ANSWER, apart

__all__ = ["Here", "Worker"]


class Worker(Protocol):
    """A worker, which answers questions about one contestant."""

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer, or ``{"error": reason}``. Raises ``RuntimeError`` if the worker is gone."""

    def end(self, seconds: float) -> None: ...


class Here:
    """A worker in this process. failed: called with the full text of exceptions."""

    def __init__(
        self,
        name: str,
        size: Size,
        device: str,
        backend: str,
        folder: Path,
        scratch: Path,
        failed: Callable[[], Any] = traceback.print_exc,
    ):
        self._make = lambda: Training(name, size, device, backend, folder, scratch)
        self._training: Training | None = None
        self._failed = failed

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        given = dict(question)
        what = given.pop("do")
        try:
            if what == "begin":
                self._training = self._make()
                return {}
            assert self._training is not None, "it has not begun"
            return getattr(self._training, what)(**given)
        except Unavailable as missing:
            return {"error": str(missing)}
        except Exception as error:
            self._failed()
            return {"error": f"{type(error).__name__}: {str(error).strip()[:600]}"}

    def end(self, seconds: float) -> None:
        self._training = None
        gc.collect()


def _serve(name: str, size: str, device: str, backend: str, folder: str, scratch: str, hang: str) -> None:
    torch.set_float32_matmul_precision("highest")
    worker = Here(name, SIZES[size], device, backend, Path(folder), Path(scratch))
    with apart() as answers:
        for line in sys.stdin:
            faulthandler.dump_traceback_later(float(hang), exit=True)
            answer = worker.ask(json.loads(line), float(hang))
            faulthandler.cancel_dump_traceback_later()
            print(ANSWER + json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
