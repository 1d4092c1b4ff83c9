"""Cross-compilation of a kernel of each family for sm_90a in one process; prints {"forward": ..., "backward": ...}.

Each value is the output of the family's own script (``cross_compile.py``, ``cross_compile_backward.py``).
Arguments: folder, and for each script its other arguments, as a JSON list.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.hopper import cross_compile, cross_compile_backward


def main(folder: Path, forward: list[str], backward: list[str]) -> None:
    places = {name: folder / name for name in ("forward", "backward")}
    for place in places.values():
        place.mkdir()
    found = {
        "forward": cross_compile.of_each(places["forward"], forward, cross_compile.main),
        "backward": cross_compile.of_each(places["backward"], backward, cross_compile_backward.main),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(json.loads, sys.argv[2:]))
