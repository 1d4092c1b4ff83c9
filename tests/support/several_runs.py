"""Several pytest runs in one process, one after the other, each with its own environment variables: shared imports happen once.

The only argument is JSON: a list of ``[variables, arguments]``; a null variable is unset. The exit status is the largest one.
"""

from __future__ import annotations

import json
import os
import sys

import pytest


def main(runs: list[tuple[dict[str, str | None], list[str]]]) -> int:
    worst = 0
    for variables, arguments in runs:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        worst = max(worst, int(pytest.main(arguments)))
    return worst


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
