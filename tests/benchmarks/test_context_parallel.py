"""The benchmark of context parallelism, rehearsed on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.limits import HANG


def test_a_rehearsal_compares_all_contestants(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["--S", "256", "--device", "cpu", "--rounds", "2", "--only", "documents|alibi", "--hang", str(HANG), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.context_parallel", *options]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=HANG)
    found = json.loads(out.read_text())["results"]
    assert [case["case"] for case in found] == ["documents", "alibi"]
    for case in found:
        assert len(case["ms"]) == 2 * 5
        assert 0 < case["error"]["anyattn.distributed"] < 1e-5
        assert case["error"]["anyattn, heads"] < 1e-5  # 0 where compiled loops compute each head alone


def test_one_process_plays_the_ranks(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["--alone", "--S", "256", "--device", "cpu", "--rounds", "2", "--only", "window", "--hang", str(HANG), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.context_parallel", *options]
    done = subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=HANG, stdout=subprocess.PIPE, text=True)
    found = json.loads(out.read_text())["results"]
    assert [(case["case"], case["rank"]) for case in found] == [("window", 0), ("window", 1)]
    assert all(case[f"{who}|{which}"]["ms"] > 0 for case in found for who in ("one GPU", "anyattn, heads") for which in ("forward", "both"))
    assert sum(line.startswith("window") for line in done.stdout.splitlines()) == 4
