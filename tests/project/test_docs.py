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
from typing import Any, NamedTuple

import pytest

import anyattn
import benchmarks.__main__
import benchmarks.gpu.__main__
from anyattn.testing.harness.case import OURS, Record, Timing
from benchmarks import report
from benchmarks.bars import Found
from tests.support import snippets
from tests.support.processes import ROOT

DOCS = ROOT / "docs"
HISTORY = sorted((DOCS / "history").glob("*.md"))
PAGES = [*sorted(DOCS.glob("*.md")), *HISTORY]
EXAMPLES = {page.relative_to(DOCS).as_posix(): snippets.of_page(page) for page in PAGES}
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
    assert {name for name, found in EXAMPLES.items() if any(s.left_out for s in found)} <= {
        "context-parallel.md",
        "cute.md",
        "transformers.md",
        "vllm.md",
    }


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
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page.relative_to(DOCS).as_posix() for page in PAGES} <= listed


# ---- what pages are made from


def test_every_public_name_has_a_place_in_the_reference() -> None:
    page = (DOCS / "api.md").read_text()
    named = set(re.findall(r"^::: anyattn\.(?:\w+\.)*(\w+)$", page, flags=re.M))
    assert set(anyattn.__all__) - {"__version__"} <= named
    for path in re.findall(r"^::: (anyattn[\w.]+)$", page, flags=re.M):
        owner, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(owner), name), path


def test_the_gallery_is_what_the_library_says() -> None:
    assert (DOCS / "gallery.md").read_text() == script("make_gallery").text(), "run make docs"


def test_the_table_of_placements_is_what_the_planner_finds() -> None:
    """Its first mask; the test below has the others."""
    made, page = script("make_placements"), (DOCS / "context-parallel.md").read_text()
    found = list(made.lines(made.ROWS[0]))
    assert len(found) == 3 and all(f"\n{line}\n" in page for line in found), "run make docs"


@pytest.mark.slow
def test_the_whole_table_of_placements_is_what_the_planner_finds() -> None:
    page = (DOCS / "context-parallel.md").read_text()
    assert script("make_placements").text(page) == page, "run make docs"


def section(heading: str, text: str | None = None) -> str:
    """The part under a heading that one page of docs/history has."""
    text = "\n".join(page.read_text() for page in HISTORY) if text is None else text
    assert f"\n{text}".count(f"\n{heading}\n") == 1, heading
    level = heading.split(" ")[0]
    return re.split(rf"^#{{1,{len(level)}}} ", f"\n{text}".split(f"\n{heading}\n")[1], maxsplit=1, flags=re.M)[0]


class Row(NamedTuple):
    """A row of docs/measured.md, under its heading."""

    heading: str
    bar: str
    wanted: str
    measured: str
    card: str
    commit: str
    command: str


def bars() -> list[Row]:
    parts = re.split(r"^## ", (DOCS / "measured.md").read_text(), flags=re.M)[1:]
    tables = {part.splitlines()[0]: [line for line in part.splitlines() if line.startswith("| ")] for part in parts}
    assert all(lines[0] == "| bar | wanted | measured | card | commit | command |" for lines in tables.values())
    return [Row(heading, *line.strip("| ").split(" | ")) for heading, lines in tables.items() for line in lines[1:]]


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d.,]*(?<![.,])", text)


def is_reached(row: Row) -> list[bool]:
    """For each figure of a row whether it is as wanted. What stands in brackets is a remark; ``A of B`` is their quotient."""
    wanted = [float(numbers(each)[0]) for each in row.wanted.split(";")]
    found = [[float(n) for n in numbers(each)] for each in re.sub(r"\(.*?\)", "", row.measured).split(";")]
    figures = [each[0] / each[1] if len(each) > 1 else each[0] for each in found]
    limits = wanted * len(figures) if len(wanted) == 1 else wanted
    assert len(limits) == len(figures) and row.wanted[0] in "≥≤", row
    return [figure >= limit if row.wanted[0] == "≥" else figure <= limit for figure, limit in zip(figures, limits)]


def test_every_bar_names_a_run_of_the_history_that_measured_it() -> None:
    """One section of the history has the row's figures, commit and card, and names its groups of cases."""
    sections = [part for page in HISTORY for part in re.split(r"^## ", page.read_text(), flags=re.M)[1:]]
    found = bars()
    assert len(found) > 80 and len((DOCS / "measured.md").read_text().splitlines()) <= 150
    for row in found:
        figures = {*numbers(row.measured.split(" (")[0]), row.commit, "AMD EPYC" if row.card == "CPU" else row.card}
        groups = re.findall(r"--group ([\w-]+)", row.command)
        named = [part for part in sections if figures <= {*numbers(part), *re.findall(r"\w{7,8}|H[12]00|AMD EPYC", part)}]
        assert any(all(re.search(rf"--group\s+{group}\b", part) for group in groups) for part in named), row


def test_missed_bars_stand_first_and_by_themselves() -> None:
    found = bars()
    assert found[0].heading == "Missed bars"
    for row in found:
        assert not any(is_reached(row)) if row.heading == "Missed bars" else all(is_reached(row)), row


def test_the_commands_of_bars_are_there() -> None:
    for row in bars():
        command = row.command.split("`")[1].split()
        if command == ["make", "test"]:
            continue
        assert command[:2] == ["python", "-m"], row
        assert importlib.util.find_spec(command[2]) is not None, row
        known = {"benchmarks": benchmarks.__main__._GROUPS, "benchmarks.gpu": benchmarks.gpu.__main__._GROUPS}.get(command[2], [])
        assert set(command[4::2]) <= set(known) or command[2] == "benchmarks.gpu.gpt", row


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
    site = tmp_path / "site"
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in PAGES} <= set(pages)
    assert 'href="../measured.html"' in pages["history/kernels.html"]
    for name, html in pages.items():
        loaded = [tag for tag in re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", html) if re.search(r"(?:src|href)=\"?https?:", tag)]
        assert not loaded, f"{name} loads {loaded}"
    for name in ("flex_attention", "PagedKVCache", "alibi_slopes", "reserve"):
        assert re.search(rf'id="anyattn\.[\w.]*{name}"', pages["api.html"]), name
