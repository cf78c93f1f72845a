"""A hook of the documentation site: links to files that are no documents become their names.

Pages are read on a code host too, where such links work. On the site nothing but `docs/` is there.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with every page."""
    here = posixpath.dirname(page.file.src_uri)

    def inside(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, found[2]))
        return f"{found[1]} (`{target.lstrip('./')}`)" if target.startswith("..") else found[0]

    return LINK.sub(inside, markdown)
