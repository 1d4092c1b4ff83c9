"""Hooks of the site: links that leave docs/ become names of files in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``[text](../path)`` is a link in the repository; on the site, where the path leaves docs/, it is the path as text. A path that
    is not there is an error."""

    def named(match: re.Match[str]) -> str:
        path = (HERE / Path(page.file.src_path).parent / match[2]).resolve()
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {match[2]}, which is not in the repository")
        return match[0] if path.is_relative_to(HERE) else f"`{path.relative_to(HERE.parent)}`"

    return OUTSIDE.sub(named, markdown)
