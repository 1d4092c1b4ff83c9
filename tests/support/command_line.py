"""Calls of the command line in this process."""

from __future__ import annotations

import contextlib
import io

import pytest

from anyattn import cli


def call(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``anyattn ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()
