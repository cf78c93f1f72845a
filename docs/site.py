"""Hooks of the documentation site: links to files that are no documents become their names, notebooks become pages.

Pages are read on a code host too, where such links work and notebooks are shown. On the site nothing but `docs/` is there.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with every page."""
    here = posixpath.dirname(page.file.src_uri)

    def inside(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, found[2]))
        if target.endswith(".ipynb"):
            return found[0].replace(".ipynb)", ".md)")
        return f"{found[1]} (`{target.lstrip('./')}`)" if target.startswith("..") else found[0]

    return LINK.sub(inside, markdown)


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this with all files it found: each notebook gets a page."""
    from mkdocs.structure.files import File

    for path in sorted(Path(config["docs_dir"], "notebooks").glob("*.ipynb")):
        content = "\n\n".join(_page(json.loads(path.read_text())))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files


def _page(notebook: Any) -> Iterator[str]:
    """A notebook as Markdown: its cells, and under each what it printed."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", []):
            said = output.get("text") or output["data"]["text/plain"]
            yield f"```text\n{''.join(said).rstrip()}\n```"
