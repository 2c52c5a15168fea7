"""The sites of a file: every node with a fault, but for those whose faults say nothing.

Left out are annotations, default values, decorators and what stands in a class (a fault there shows
at import or is one of the caller's), `__repr__` and `__str__`, all texts and what they show, what
a `raise` says, asserts, protocols and `if TYPE_CHECKING`. Of a module's own statements the numbers
that its functions read are taken.
"""

import ast
from collections import Counter
from collections.abc import Iterator

from .operators import Fault, faults_of
from .site import Edit, Site, key_of

PROBE = "\1"  # where the call that tells that a site was reached is to stand
_SHOWN = ("__repr__", "__str__")
_SHORT = 100  # characters of code in a report


def sites_of(file: str, text: str) -> list[Site]:
    """All sites of a file, in order.

    Args:
        file: path below the project's root, a part of the keys.
        text: what is in it.
    """
    return list(_Finder(file, text).sites())


class _Finder:
    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text
        self._tree = ast.parse(text)
        self._lines = text.splitlines(keepends=True)
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._seen: Counter[tuple[str, ...]] = Counter()

    def sites(self) -> Iterator[Site]:
        yield from self._numbers()
        for statement in self._tree.body:
            yield from self._definition(statement, "")

    # The module's own numbers.

    def _numbers(self) -> Iterator[Site]:
        """`_DEPTH = 8`, where functions of the file read it: they tell that it was reached."""
        for statement in self._tree.body:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                continue
            target = statement.targets[0]
            if not isinstance(target, ast.Name) or not isinstance(statement.value, ast.Constant):
                continue
            if readers := tuple(self._readers(target.id)):
                for fault in faults_of(statement.value, ""):
                    yield self._site(fault, "", statement, readers)

    def _readers(self, name: str) -> Iterator[Edit]:
        for function in ast.walk(self._tree):
            if isinstance(function, ast.FunctionDef):
                for statement in function.body:
                    for node in ast.walk(statement):
                        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
                        if is_read and node.id == name:  # type: ignore[attr-defined]
                            yield from self._around(node)

    # What stands in functions.

    def _definition(self, node: ast.stmt, scope: str) -> Iterator[Site]:
        if isinstance(node, ast.ClassDef):
            if not any("Protocol" in ast.unparse(base) for base in node.bases):
                for statement in node.body:
                    yield from self._definition(statement, f"{scope}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and _says_something(node):
            for statement in node.body:
                yield from self._statement(statement, f"{scope}{node.name}")

    def _statement(self, node: ast.stmt, function: str) -> Iterator[Site]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from self._definition(node, f"{function}.")
        elif not isinstance(node, ast.Assert | ast.Import | ast.ImportFrom):
            yield from self._inside(node, function, node)

    def _inside(self, node: ast.AST, function: str, statement: ast.stmt) -> Iterator[Site]:
        for fault in faults_of(node, function):
            yield self._site(fault, function, statement, ())
        for child in _children(node):
            if isinstance(child, ast.stmt):
                yield from self._statement(child, function)
            else:
                yield from self._inside(child, function, statement)

    def _site(
        self, fault: Fault, function: str, statement: ast.stmt, probes: tuple[Edit, ...]
    ) -> Site:
        start, end = self._span(fault.node)
        says = (self._file, function, header(statement), fault.operator, fault.alike)
        number = self._seen[says]
        self._seen[says] += 1
        new = ast.unparse(ast.fix_missing_locations(fault.instead))
        # As many lines as before, so that all that is told about lines stays true.
        new += "\n" * self._text.count("\n", start, end)
        is_statement = isinstance(fault.node, ast.stmt)
        before = " ".join(self._text[start:end].split())
        after = " ".join(ast.unparse(fault.instead).split())
        return Site(
            key_of(*says, str(number)),
            self._file,
            fault.node.lineno,  # type: ignore[attr-defined]
            function,
            fault.operator,
            before if len(before) < _SHORT else f"{before[:_SHORT]} ...",
            after if len(after) < _SHORT else f"{after[:_SHORT]} ...",
            Edit(start, end, new if is_statement else f"({new})"),
            probes or tuple(self._probes(fault.node)),
        )

    def _probes(self, node: ast.AST) -> Iterator[Edit]:
        """Around the value, which is told without a line more; before a statement without one."""
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign):
            yield from self._around(node.value)
        elif isinstance(node, ast.stmt):
            start, _ = self._span(node)
            yield Edit(start, start, f"{PROBE}; ")
        else:
            yield from self._around(node)

    def _around(self, node: ast.AST) -> Iterator[Edit]:
        start, end = self._span(node)
        yield Edit(start, start, f"({PROBE} or (")
        yield Edit(end, end, "))")

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node stands. Its columns count bytes."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._place(node.lineno, node.col_offset),
            self._place(node.end_lineno, node.end_col_offset),
        )

    def _place(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)


def header(statement: ast.stmt) -> str:
    """The statement without what stands indented below it."""
    if isinstance(statement, ast.If | ast.While):
        return ast.unparse(statement.test)
    if isinstance(statement, ast.For):
        return f"{ast.unparse(statement.target)} in {ast.unparse(statement.iter)}"
    if isinstance(statement, ast.With):
        return ", ".join(map(ast.unparse, statement.items))
    if isinstance(statement, ast.Match):
        return ast.unparse(statement.subject)
    return "" if isinstance(statement, ast.Try) else ast.unparse(statement)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one whose faults say something."""
    if isinstance(node, ast.JoinedStr | ast.Raise):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "pattern", "ctx", "op", "ops") or isinstance(node, ast.arguments):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _says_something(function: ast.FunctionDef) -> bool:
    decorators = {ast.unparse(one).rpartition(".")[-1] for one in function.decorator_list}
    return function.name not in _SHOWN and not decorators & {"overload", "abstractmethod"}
