"""How large and how dense the product's code is, by folder; see scripts/house.

A line of code is one that is neither blank, nor a comment, nor within a docstring. Density is the
number of syntax nodes a line of code, without those that say load or store. A comment line has
nothing but a comment. The lines of a function include its docstring.
"""

import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

ROOTS = ("axrt", "scheduler", "offload")
MOST_METHODS, MOST_LINES, MOST_PARAMETERS, MOST_OF_FILE = 30, 60, 8, 450
LIMITS = (
    f"a class {MOST_METHODS} methods, a function {MOST_LINES} lines or {MOST_PARAMETERS} "
    f"parameters, a file {MOST_OF_FILE} lines"
)
HEADS = (
    "files, lines",
    "function lines, median / p90 / max",
    "density",
    "comments, %",
    "docstrings, %",
)


@dataclass
class Measured:
    """What was counted in some files."""

    files: int = 0
    lines: int = 0
    code: int = 0
    comments: int = 0
    docstrings: int = 0
    nodes: int = 0
    functions: list[int] = field(default_factory=list)  # lines of each
    over: list[str] = field(default_factory=list)

    def add(self, other: "Measured") -> None:
        """Count another's as well."""
        self.files += other.files
        self.lines += other.lines
        self.code += other.code
        self.comments += other.comments
        self.docstrings += other.docstrings
        self.nodes += other.nodes
        self.functions += other.functions
        self.over += other.over


def measured(path: Path) -> Measured:
    """What is in a file."""
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    in_docstrings = _lines_of_docstrings(tree)
    comments = _lines_of_comments(text)
    blank = {number for number, line in enumerate(lines, 1) if not line.strip()}
    code = len(lines) - len(in_docstrings | comments | blank)
    found = Measured(1, len(lines), code, len(comments), len(in_docstrings))
    found.nodes = sum(not isinstance(node, ast.expr_context) for node in ast.walk(tree))
    if len(lines) > MOST_OF_FILE:
        found.over.append(f"{path}: {len(lines)} lines")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _look_at_function(path, node, found)
        elif isinstance(node, ast.ClassDef):
            methods = sum(isinstance(one, ast.FunctionDef) for one in node.body)
            if methods > MOST_METHODS:
                found.over.append(f"{path}:{node.lineno} {node.name}: {methods} methods")
    return found


def _look_at_function(
    path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef, found: Measured
) -> None:
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    found.functions.append(lines)
    of = node.args
    names = [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    parameters = len([name for name in names if name not in ("self", "cls")])
    where = f"{path}:{node.lineno} {node.name}"
    if lines > MOST_LINES:
        found.over.append(f"{where}: {lines} lines")
    if parameters > MOST_PARAMETERS:
        found.over.append(f"{where}: {parameters} parameters")


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first


def _lines_of_docstrings(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for one in _docstrings(tree):
        found.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return found


def _lines_of_comments(text: str) -> set[int]:
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            found.add(token.start[0])
    return found


def files_of(root: Path) -> Iterator[Path]:
    """The files below a folder, those behind links left out."""
    for path in sorted(root.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir():
            yield from files_of(path)
        elif path.suffix == ".py":
            yield path


def row(name: str, of: Measured) -> str:
    """A row of the table."""
    taken = sorted(of.functions) or [0]
    ninth = taken[min(len(taken) - 1, len(taken) * 9 // 10)]
    sizes = f"{statistics.median(taken):.0f} / {ninth} / {taken[-1]}"
    density = of.nodes / max(1, of.code)
    shares = [f"{100 * part / max(1, of.lines):.1f}" for part in (of.comments, of.docstrings)]
    cells = [name, f"{of.files}, {of.lines:,}", sizes, f"{density:.1f}", *shares]
    return f"| {' | '.join(cells)} |"


@click.command()
@click.argument("roots", nargs=-1)
@click.option("--over", is_flag=True, help="list what is over the limits, too")
def main(roots: Sequence[str], over: bool) -> None:
    """Print a row for each folder, and what is over the limits."""
    every, by_folder = Measured(), defaultdict[str, Measured](Measured)
    for root in roots or ROOTS:
        for path in files_of(Path(root)):
            found = measured(path)
            every.add(found)
            by_folder[str(path.parent)].add(found)
    print(f"| | {' | '.join(HEADS)} |")
    print("|---|" + "---|" * len(HEADS))
    print(row("all", every))
    for folder, of in sorted(by_folder.items()):
        print(row(folder, of))
    print(f"\n{len(every.over)} over the limits: {LIMITS}")
    if over:
        print("\n".join(every.over))


if __name__ == "__main__":
    main()
