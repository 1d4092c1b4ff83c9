"""Several pytest runs in one process, one after the other, each with its own environment variables: shared imports happen once.

The only argument is JSON: a list of ``[variables, arguments]``; a null variable is unset. The exit status is the largest one. What has
failed is printed once more behind all runs, for whoever shows the end of the output alone.
"""

from __future__ import annotations

import json
import os
import sys

import pytest


class Failures:
    """A plugin of pytest that keeps the reports of what has failed, also while tests are collected."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport | pytest.CollectReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.reports.append(report)


def main(runs: list[tuple[dict[str, str | None], list[str]]]) -> int:
    failures = Failures()
    worst = 0
    for variables, arguments in runs:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        worst = max(worst, int(pytest.main(arguments, plugins=[failures])))
    for report in failures.reports:
        print(f"FAILED {report.nodeid}\n{report.longreprtext[-2000:]}")
    return worst


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
