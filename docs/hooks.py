"""Hooks of the site: links that leave docs/ become names of files in the repository; pages of optional parts join the navigation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OPTIONAL = {
    "transformers.md": ("How to", "run Transformers' models"),
    "serving.md": ("How to", "serve requests"),
    "finetuning.md": ("How to", "fine-tune"),
}
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Adds the optional pages that are there."""
    for page, (section, title) in OPTIONAL.items():
        listed = next(entry[section] for entry in config.nav if isinstance(entry, dict) and section in entry)
        if (HERE / page).exists() and not any(page in entry.values() for entry in listed):
            listed.append({title: page})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``[text](../path)`` is a link in the repository; on the site it is the path as text. A path that is not there is an error."""

    def named(match: re.Match[str]) -> str:
        path = (HERE / Path(page.file.src_path).parent / match[2]).resolve()
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {match[2]}, which is not in the repository")
        return f"`{path.relative_to(HERE.parent)}`"

    return OUTSIDE.sub(named, markdown)
