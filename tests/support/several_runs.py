"""Several runs of pytest in one process, one after the other, each with variables of its own: what they import is imported once.

The one argument is JSON: a list of ``[variables, arguments]``, of which a variable that is null is unset. The exit status is the greatest.
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
