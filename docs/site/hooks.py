"""Pages that the site makes itself: a reference of the public names, and a page for each source that is linked to."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ("axon_ps.errors", "axon_ps.data", "axon_ps.parallel", "axon_ps.testing", "axon_ps")
"""Modules whose public names are documented, each in the first that has it."""

_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the reference, and the sources that pages link to."""
    pages = [f for f in files.documentation_pages() if f.abs_src_path]
    sources = {m[1] for page in pages for m in _OUTSIDE.finditer(Path(str(page.abs_src_path)).read_text("utf-8"))}
    sources |= {f"{s}/{path.name}" for s in sources if (ROOT / s).is_dir() for path in (ROOT / s).iterdir()}
    for source in sorted(sources):
        files.append(File.generated(config, _page_of(source), content=f"# {source}\n\n{_shown(ROOT / source)}"))
    documented: set[str] = set()
    for name in PUBLIC:
        files.append(File.generated(config, f"reference/{name}.md", content=_reference(name, documented)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to files of the tree to their pages."""
    return _OUTSIDE.sub(lambda m: f"]({_page_of(m[1])})", markdown)


def _page_of(source: str) -> str:
    return f"source/{source}.md"


def _shown(path: Path) -> str:
    """A file's text, or links to the pages of a directory's files."""
    if path.is_dir():
        return "".join(f"- [{one.name}]({path.name}/{one.name}.md)\n" for one in sorted(path.iterdir()))
    fence = {".md": "markdown", ".json": "json"}.get(path.suffix, "python")
    return f"````{fence}\n{path.read_text('utf-8')}\n````\n"


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    own = [k for k, v in vars(module).items() if k[0] != "_" and getattr(v, "__module__", "") == module.__name__]
    names = ((name, getattr(module, name)) for name in getattr(module, "__all__", own))
    return ((name, thing) for name, thing in names if not isinstance(thing, ModuleType))


def _reference(name: str, documented: set[str]) -> str:
    module = importlib.import_module(name)
    elsewhere, here = [], []
    for public, thing in _public(module):
        full = f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else f"{name}.{public}"
        (elsewhere if full in documented else here).append(full)
    documented.update(here)
    links = "".join(f"- [{full.rpartition('.')[2]}][{full}]\n" for full in sorted(elsewhere))
    blocks = "\n".join(f"::: {full}\n" for full in sorted(here, key=lambda full: full.rpartition(".")[2]))
    return f"# {name}\n\n{(module.__doc__ or '').strip()}\n\n{links}\n{blocks}"
