"""The docs: examples run, errors are quoted, links lead somewhere, plots and tables are what was measured and planned, the site builds."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import anyattn
from anyattn.testing.harness.case import OURS, Record, Timing
from benchmarks import report
from benchmarks.bars import Found
from tests.support import snippets
from tests.support.processes import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
EXAMPLES = {page.name: snippets.of_page(page) for page in PAGES}
WITH_EXAMPLES = [name for name, found in EXAMPLES.items() if found]


def script(name: str) -> types.ModuleType:
    """One of the programs that write pages and plots."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


# ---- examples


def test_every_block_of_python_is_found() -> None:
    assert sum(map(len, EXAMPLES.values())) == sum(page.read_text().count("```python") for page in PAGES)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_page_run_one_after_the_other(name: str) -> None:
    """Those before which the page says why not are left out."""
    module = snippets.module(f"docs_page_{Path(name).stem.replace('-', '_')}")
    for snippet in EXAMPLES[name]:
        if snippet.left_out is not None or (snippet.is_compiled and not snippets.can_compile()):
            continue
        if snippet.raises is None:
            snippets.run(snippet, module.__dict__, f"docs/{name}:{snippet.line}")
            continue
        with pytest.raises(Exception) as raised:
            snippets.run(snippet, module.__dict__, "my_program.py")
        said = f"{type(raised.value).__name__}: {raised.value}"
        assert said == snippet.raises or (snippet.raises.endswith("...") and said.startswith(snippet.raises[:-3])), f"{name}:{snippet.line}"


def test_only_what_needs_another_machine_or_a_download_is_left_out() -> None:
    assert {name for name, found in EXAMPLES.items() if any(s.left_out for s in found)} <= {"cute.md", "transformers.md"}


def test_pages_of_errors_say_what_is_raised() -> None:
    assert sum(s.raises is not None for s in EXAMPLES["troubleshooting.md"]) == len(EXAMPLES["troubleshooting.md"]) > 20


# ---- links


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def links() -> list[tuple[Path, str]]:
    pages = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
    prose = {page: re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M) for page in pages}
    return [(page, target) for page, text in prose.items() for target in re.findall(r"\]\(([^)\s]+)\)", text)]


def test_links_lead_to_files_and_headings() -> None:
    found = links()
    broken = []
    for page, target in found:
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"{page.name}: {target} is not there")
        elif anchor and anchor not in {slug(h) for h in re.findall(r"^#+ (.*)$", file.read_text(), flags=re.M)}:
            broken.append(f"{page.name}: {target} has no such heading")
    assert len(found) > 60 and not broken, "\n".join(broken)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page.name for page in PAGES} <= listed


# ---- what pages are made from


def test_every_public_name_has_a_place_in_the_reference() -> None:
    page = (DOCS / "api.md").read_text()
    named = set(re.findall(r"^::: anyattn\.(?:\w+\.)*(\w+)$", page, flags=re.M)) | {"AuxRequest", "AuxOutput"}
    assert set(anyattn.__all__) - {"__version__"} <= named
    for path in re.findall(r"^::: (anyattn[\w.]+)$", page, flags=re.M):
        owner, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(owner), name), path


def test_the_gallery_is_what_the_library_says() -> None:
    assert (DOCS / "gallery.md").read_text() == script("make_gallery").text(), "run make docs"


def section(heading: str, text: str | None = None) -> str:
    """The part of docs/measured.md under a heading."""
    text = (DOCS / "measured.md").read_text() if text is None else text
    assert f"\n{text}".count(f"\n{heading}\n") == 1, heading
    level = heading.split(" ")[0]
    return re.split(rf"^#{{1,{len(level)}}} ", f"\n{text}".split(f"\n{heading}\n")[1], maxsplit=1, flags=re.M)[0]


def check_gpu_figures(data: dict[str, Any], measured: str) -> None:
    """Each plotted ratio stands in the row of its bar, or of its case."""
    assert data["commit"] in measured + data["section"] and data["date"] in measured + data["section"]
    bars = dict(line.strip("| ").split(" | ")[::2] for line in measured.splitlines() if line.startswith("| ") and line.count(" | ") == 2)
    cases = {line.strip("| ").split(" | ")[0].removesuffix(" (disturbed)"): line for line in measured.splitlines() if line.startswith("| ")}
    for row in data["rows"]:
        if "measured" in row:  # the ratio, or with is_share the part of the peer's time
            line = next(line for line in measured.splitlines() if line.startswith(f"| {row['case']} |"))
            assert row["measured"] in re.findall(r"[\d.]+", line), row
            assert row["ratio"] == round(1 / float(row["measured"]), 2) if row.get("is_share") else float(row["measured"]), row
        elif "bar" in row:
            assert f"{row['ratio']:.2f}" in re.split(r"[;,] ", bars[row["bar"]]), row
        else:
            assert f"{row['ratio']:.2f}x" in re.split(r"[|,] ?", cases[row["case"]].replace(" |", "|")), row


def test_plotted_figures_of_the_gpu_are_the_measured_ones() -> None:
    data = json.loads((DOCS / "data" / "h200.json").read_text())
    for name, source in {"": data, **data["sources"]}.items():
        rows = [row for row in data["rows"] if row.get("source", "") == name]
        found = section(source["section"])
        assert source["card"] in found + source["section"]
        check_gpu_figures({**data, **source, "rows": rows}, found[found.index(source["commit"]) :])  # the table that follows the commit
    passes = {row["backend"] for row in data["rows"]}
    assert len(data["rows"]) > 24 and {"Hopper, backward", "training step of a compiled GPT"} <= passes


def run_of_the_benchmark() -> tuple[dict[str, Any], str]:
    """A run's JSON and Markdown: two cases with figures, one that went wrong, one of another group."""

    def record(group: str, variant: str, share: float = 0.3, **seconds: float) -> Record:
        made = Record(f"{group}/{variant}/d128/8192", group, "flex", variant, "bfloat16", "B2 H16 S8192 D128", flops=10**12)
        made.timings = {name.replace("_", "-"): Timing((each, each * 1.01, each * 0.99)) for name, each in seconds.items()}
        made.budget, made.extra = {OURS: share}, {"backend": "hopper + triton" if group == "backward" else "hopper"}
        return made

    records = [
        record("variants", "sink_window", anyattn=1e-3, flex_flash=1.5e-3, flex_triton=2e-3, anyattn_mod=0.5e-3),
        record("backward", "document-causal", anyattn=2e-3, flex_triton=2.48e-3),
        record("variants", "full", share=1.2, anyattn=1e-3, fa3=2e-3),
        record("host", "causal", anyattn=1e-3, flex=2e-3),
    ]
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    machine = {
        "date": "2026-11-22 04:00 UTC",
        "commit": "abc1234",
        "command": "python -m benchmarks.gpu",
        "gpu": "a GPU",
        "versions": versions,
    }
    found = Found({each.case: each for each in records}, {})
    return json.loads(json.dumps(report.as_json(machine, found, []))), report.as_markdown(machine, found, [])


def test_a_run_of_the_gpu_benchmark_becomes_plotted_figures() -> None:
    run, markdown = run_of_the_benchmark()
    data = script("take_run").taken(run)
    assert [(row["variant"], row["peer"], row["backend"], row["ratio"]) for row in data["rows"]] == [
        ("sink window", "flex_attention, FLASH", "Hopper, forward", 1.5),
        ("document + causal", "flex_attention, TRITON", "Triton, backward", 1.24),
    ]
    check_gpu_figures(data, section(data["section"], markdown))
    data["rows"][0]["ratio"] = 1.6
    with pytest.raises(AssertionError, match="sink window"):
        check_gpu_figures(data, section(data["section"], markdown))


def test_plotted_figures_of_the_cpu_are_the_measured_ones() -> None:
    data = json.loads((DOCS / "data" / "cpu.json").read_text())
    measured = section(data["section"])
    assert data["commit"] in data["section"] and f"`{data['command']}` on {data['with'].split(';')[0]}" in measured
    head = next(line for line in measured.splitlines() if line.startswith("| case |")).strip("| ").split(" | ")
    found = {}
    for line in measured.splitlines():
        if line.startswith("| forward/"):
            cells = dict(zip(head, line.strip("| ").split(" | ")))
            found[cells["case"]] = {k[3:]: float(v[:-1]) for k, v in cells.items() if k.startswith("vs ") and v != "-"}
    assert {f"forward/{row['variant']}/4096/{row['dtype']}": row["ratios"] for row in data["rows"]} == found


def test_the_table_of_backends_is_what_the_planner_says() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == script("make_support").with_table(readme), "run make docs"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, of the viz extra")
@pytest.mark.parametrize(("name", "make"), [("speed", "h200"), ("cpu", "cpu")])
def test_plots_show_every_figure(name: str, make: str, tmp_path: Path) -> None:
    """Of the bars, and of the picture that is committed."""
    plots = script("make_plots")
    ratios = [r for row in plots.data(make)["rows"] for r in row.get("ratios", {0: row.get("ratio")}).values()]
    texts = [text.get_text() for axes in getattr(plots, make)().axes for text in axes.texts]
    assert sorted(texts) == sorted(f"{ratio:.2f}" for ratio in ratios)
    svg = (DOCS / "plots" / f"{name}.svg").read_text()
    assert all(f"<!-- {ratio:.2f} -->" in svg for ratio in ratios), "run make docs"


# ---- the site


def test_docstrings_become_lists_and_code() -> None:
    pytest.importorskip("griffe", reason="needs the docs extra")
    text = "A call.\n\n    q: the queries. k, v: keys,\n    and values. note: no argument.\n\n    >>> f(1)\n    2\n"
    wanted = "A call.\n\n- **q**: the queries.\n- **k, v**: keys,\n  and values. note: no argument.\n\n```pycon\n>>> f(1)\n2\n```"
    assert script("docstrings").as_markdown(text, ["q", "k", "v"]) == wanted


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None, reason="needs the docs extra"
)
def test_the_site_builds_without_a_warning_and_without_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text() for path in (tmp_path / "site").glob("*.html")}
    assert {page.with_suffix(".html").name for page in PAGES} <= set(pages)
    for name, html in pages.items():
        loaded = [tag for tag in re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", html) if re.search(r"(?:src|href)=\"?https?:", tag)]
        assert not loaded, f"{name} loads {loaded}"
    for name in ("flex_attention", "PagedKVCache", "alibi_slopes", "reserve"):
        assert re.search(rf'id="anyattn\.[\w.]*{name}"', pages["api.html"]), name
