"""Child processes: a question-and-answer protocol in JSON lines (both ends), and probes in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

__all__ = ["ANSWER", "CACHE_FOLDERS", "Child", "apart", "probed"]

# cache folders of anyattn and its compilers
CACHE_FOLDERS = ("ANYATTN_CACHE_DIR", "XDG_CACHE_HOME", "CUTE_DSL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
ANSWER = "@ahead "  # prefix of the child's answers; compilers print to the same stream


class Child:
    """The parent's end of a child process."""

    def __init__(self, command: list[str], log: TextIO, environment: Mapping[str, str]):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True)

    def ask(self, question: Any, seconds: float) -> Any:
        """The child's answer. Raises ``RuntimeError`` if the child died, or took longer and was killed."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
            raise RuntimeError(f"its process ended with exit code {process.wait(10)}")
        except OSError as broken:
            raise RuntimeError(f"its process ended with exit code {process.wait(10)}") from broken
        finally:
            alarm.cancel()

    def end(self, seconds: float = 0.0) -> None:
        """Ends the child. seconds: how long it may take to exit after its input is closed."""
        if seconds and self._process.stdin is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(seconds)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@contextmanager
def apart() -> Iterator[TextIO]:
    """Context in the child: redirects the compilers' output to stderr, and yields the stream for answers."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield answers


def probed(module: str, name: str, timeout_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON object that ``python -m module name`` prints last in a fresh process, or ``{"error": reason}``."""
    command, root = [sys.executable, "-m", module, name], Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=root)
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {timeout_s:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])
