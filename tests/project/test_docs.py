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

import pytest

import anyattn
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


def test_only_what_needs_another_machine_is_left_out() -> None:
    assert {name for name, found in EXAMPLES.items() if any(s.left_out for s in found)} <= {"cute.md"}


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
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())) | set(script("hooks").OPTIONAL)
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


def section(heading: str) -> str:
    """The part of docs/measured.md under a heading."""
    text = (DOCS / "measured.md").read_text()
    assert text.count(f"\n{heading}\n") == 1, heading
    level = heading.split(" ")[0]
    return re.split(rf"^#{{1,{len(level)}}} ", text.split(f"\n{heading}\n")[1], maxsplit=1, flags=re.M)[0]


def test_plotted_figures_of_the_gpu_are_the_measured_ones() -> None:
    data = json.loads((DOCS / "data" / "h200.json").read_text())
    measured = section(data["section"])
    assert data["commit"] in measured and data["date"] in measured
    rows = dict(line.strip("| ").split(" | ")[::2] for line in measured.splitlines() if line.startswith("| ") and line.count(" | ") == 2)
    for row in data["rows"]:
        assert f"{row['ratio']:.2f}" in re.split(r"[;,] ", rows[row["bar"]]), row
    assert len(data["rows"]) > 12


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
