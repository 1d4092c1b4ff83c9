"""The clock of the tests that bound a first call's time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unhindered import CLOCK

BUSY = "import os\nos.sched_setaffinity(0, {core})\nwhile os.getppid() == {parent}: pass"
SCRIPT = """
import json, os
os.sched_setaffinity(0, {core})
begun, wall, worked = clock(), time.perf_counter(), time.process_time()
while time.process_time() < worked + 0.3:
    pass
both = clock() - begun, time.perf_counter() - wall
begun = clock()
time.sleep(0.2)
print(json.dumps([*both, clock() - begun]))
"""


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this system does not count it")
def test_others_on_the_same_core_take_no_time_and_sleep_does() -> None:
    core = {min(os.sched_getaffinity(0))}
    others = [subprocess.Popen([sys.executable, "-c", BUSY.format(core=core, parent=os.getpid())]) for _ in range(3)]
    try:
        said = subprocess.run([sys.executable, "-c", CLOCK + SCRIPT.format(core=core)], capture_output=True, text=True, timeout=60)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert said.returncode == 0, said.stderr
    alone, wall, asleep = json.loads(said.stdout)
    assert 0.29 < alone < 0.5 < wall and 0.19 < asleep < 2
