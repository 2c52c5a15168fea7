"""Which tests reach a site: a copy of the project in which each site tells of itself, once a test.

The call stands within the line, so that lines keep their numbers, and it needs nothing of the
project, so that it works wherever the file is imported; torch's compiler takes what it returns as a
constant, and so keeps it out of what it compiles. A process writes what it has to tell to a
file of its own, at once: nothing is lost when it is killed. The test is the one that pytest names
in the environment, which processes that a test starts inherit, ranks under mpirun too.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from .site import Edit, Site, edited
from .sites import PROBE

_NAME = "_mutation_reached"
_CODE = """
def reached(site, seen=set(), folder={folder!r}):
    import os
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (site, test) not in seen:
        seen.add((site, test))
        try:
            told = os.open(folder + "/" + str(os.getpid()), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(told, (site + "\\t" + test + "\\n").encode())
            os.close(told)
        except OSError:
            pass
reached._dynamo_marked_constant = True
"""


def plant(root: Path, sites: Iterable[Site], folder: Path) -> None:
    """Put the probes of these sites into the files below `root`, which tell of them in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)  # a test may run as somebody else
    for file, of_file in by_file(sites).items():
        path = root / file
        path.write_text(probed(path.read_text(), of_file, str(folder)))


def probed(text: str, sites: Iterable[Site], folder: str) -> str:
    """The text of a file with the probes of its sites."""
    edits = [
        Edit(edit.start, edit.end, edit.text.replace(PROBE, f"{_NAME}({site.key!r})"))
        for site in sites
        for edit in site.probes
    ]
    setup = f"exec({_CODE.format(folder=folder)!r}, _m := {{}}); {_NAME} = _m['reached']"
    return edited(text, [_first(text, setup), *_nested(edits)])


def _nested(edits: list[Edit]) -> list[Edit]:
    """Insertions of sites within each other: what closes at a place stands before what opens."""
    return sorted(edits, key=lambda edit: (edit.start, edit.text != "))"))


def _first(text: str, setup: str) -> Edit:
    """The insertion behind the docstring and what is imported from the future."""
    lines = text.splitlines(keepends=True)
    last = None
    for node in ast.parse(text).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not is_docstring and not is_future:
            break
        last = node
    if last is None:
        return Edit(0, 0, f"{setup}; ")
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    before = lines[last.end_lineno - 1].encode()[: last.end_col_offset].decode()
    place = sum(map(len, lines[: last.end_lineno - 1])) + len(before)
    return Edit(place, place, f"; {setup}")


def by_file(sites: Iterable[Site]) -> Mapping[str, list[Site]]:
    files: dict[str, list[Site]] = defaultdict(list)
    for site in sites:
        files[site.file].append(site)
    return files


def read(folder: Path) -> dict[str, set[str]]:
    """The tests that reached each site, by its key, each with the phase as pytest names it: an id
    and ` (call)`, or nothing where no test ran."""
    reached: dict[str, set[str]] = defaultdict(set)
    for path in folder.iterdir():
        for line in path.read_text(errors="replace").splitlines():
            key, _, test = line.partition("\t")
            reached[key].add(test)
    return reached
