"""What can be wrong with a node of the code: each operator yields the faults of one kind.

A fault is the node as it would be with the mistake. `sites` finds the nodes, and leaves out those
whose faults would say nothing.
"""

import ast
import copy
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_PATH = re.compile(r"folder|path|file|root|parent|home|director", re.IGNORECASE)
_NO_NUMBERS = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)
_NAMED = (ast.Name, ast.Attribute)
_EITHER_WAY = ("max", "min", "isinstance", "cast", "print")  # arguments in any order, or no matter
_ONLY_TOLD = ("print", "echo", "warn", "debug", "info", "super")  # calls that only tell somebody
_BUILDERS = ("__init__", "__post_init__", "__new__")


class Fault(NamedTuple):
    """A fault in one node.

    Args:
        operator: its kind.
        node: node that is replaced.
        instead: what takes its place.
        alike: what tells it from other faults of this operator in the same statement.
    """

    operator: str
    node: ast.AST
    instead: ast.AST
    alike: str


def faults_of(node: ast.AST, function: str) -> Iterator[Fault]:
    """What can be wrong with this very node, which stands in the function of this name."""
    for operator in _OPERATORS:
        yield from operator(node)
    if isinstance(node, ast.stmt) and _may_be_dropped(node, function):
        yield Fault("statement dropped", node, ast.Pass(), "")


def _compared(node: ast.AST) -> Iterator[Fault]:
    if not isinstance(node, ast.Compare):
        return
    for place, kind in enumerate(map(type, node.ops)):
        changed = copy.deepcopy(node)
        changed.ops[place] = COMPARISONS[kind]()
        yield Fault("comparison", node, changed, f"{place} {ast.unparse(node)}")


def _calculated(node: ast.AST) -> Iterator[Fault]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield Fault("sign", node, node.operand, ast.unparse(node))
    elif isinstance(node, ast.BinOp) and _is_of_numbers(node.op, node.left, node.right):
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield Fault("sign", node, changed, ast.unparse(node))
    elif isinstance(node, ast.AugAssign) and _is_of_numbers(node.op, node.target, node.value):
        added = copy.deepcopy(node)
        added.op = ARITHMETIC[type(node.op)]()
        yield Fault("sign", node, added, "")


def _is_of_numbers(operator: ast.operator, *operands: ast.expr) -> bool:
    """It is arithmetic, as far as the text tells: no text that is joined, and no path."""
    if type(operator) not in ARITHMETIC:
        return False
    if any(isinstance(one, _NO_NUMBERS) or _is_text(one) for one in operands):
        return False
    return not (isinstance(operator, ast.Div) and _PATH.search(ast.unparse(operands[0])))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _bounded(node: ast.AST) -> Iterator[Fault]:
    if isinstance(node, ast.Call) and _name(node.func) == "range":
        bounds = [(bound, -1 if bound is node.args[-1] else 1) for bound in node.args[:2]]
        if len(node.args) == 3:
            bounds = [(node.args[0], 1), (node.args[1], -1)]
    elif isinstance(node, ast.Slice):
        bounds = [(one, by) for one, by in ((node.lower, 1), (node.upper, -1)) if one is not None]
    else:
        return
    for number, (bound, by) in enumerate(bounds):
        operator = ast.Add() if by > 0 else ast.Sub()
        moved = ast.BinOp(bound, operator, ast.Constant(1))
        yield Fault("bound", bound, moved, f"{number} {ast.unparse(node)}")


def _decided(node: ast.AST) -> Iterator[Fault]:
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield Fault("condition", node, ast.BoolOp(other, node.values), ast.unparse(node))
    for test in _tests(node):
        if not isinstance(test, ast.Compare | ast.Constant):  # a comparison has its own fault
            yield Fault("condition", test, negated(test), f"not {ast.unparse(test)}")


def negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _tests(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _called(node: ast.AST) -> Iterator[Fault]:
    if not isinstance(node, ast.Call) or _name(node.func) in _EITHER_WAY:
        return
    for place, (one, other) in enumerate(zip(node.args, node.args[1:], strict=False)):
        # Of others the types differ as a rule, and a fault that no run survives says little.
        are_named = isinstance(one, _NAMED) and isinstance(other, _NAMED)
        if are_named and ast.dump(one) != ast.dump(other):
            changed = ast.Call(node.func, list(node.args), node.keywords)
            changed.args[place], changed.args[place + 1] = other, one
            yield Fault("arguments swapped", node, changed, f"{place} {ast.unparse(node)}")


def _constant(node: ast.AST) -> Iterator[Fault]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield Fault("constant", node, ast.Constant(_changed(node.value)), repr(node.value))


def _changed(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) or value == 0 else value * 2


def _may_be_dropped(node: ast.stmt, function: str) -> bool:
    """Without it the code still runs, for a while: no name that is read later is missing."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and _name(node.value.func) not in _ONLY_TOLD
    if isinstance(node, ast.Assign):
        targets = all(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets)
        return targets and function.rpartition(".")[-1] not in _BUILDERS
    if isinstance(node, ast.Return):
        return node.value is None
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Continue | ast.Break | ast.Raise)


def _name(function: ast.expr) -> str:
    """The last part of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


_OPERATORS: tuple[Callable[[ast.AST], Iterator[Fault]], ...] = (
    _compared,
    _calculated,
    _bounded,
    _decided,
    _called,
    _constant,
)
