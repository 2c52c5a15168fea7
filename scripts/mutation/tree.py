"""A copy of the project in which a fault is planted, and taken out again."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .site import Site, edited

_LEFT_OUT = (".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "runs", "build")


def copied(root: Path, to: Path) -> Path:
    """A fresh copy of the project, links as links; without what can be made anew."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(root, to, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    return to


@contextmanager
def planted(tree: Path, site: Site) -> Iterator[None]:
    """Context in which the copy has this fault."""
    path = tree / site.file
    text = path.read_text()
    path.write_text(edited(text, [site.edit]))
    try:
        yield
    finally:
        path.write_text(text)
