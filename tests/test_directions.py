"""Imports go one way: the brain knows nobody, the workers know the brain."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imports(path: Path) -> set[str]:
    """First parts of the absolute imports of a file; relative ones stay inside their folder."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    absolute = {
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0
    }
    return {name.split(".")[0] for name in plain | absolute}


def climbs_out(path: Path, room: Path) -> bool:
    depth = len(path.relative_to(room).parts)
    return any(
        isinstance(n, ast.ImportFrom) and n.level > depth
        for n in ast.walk(ast.parse(path.read_text()))
    )


def test_the_brain_imports_the_standard_library_and_itself() -> None:
    for path in (ROOT / "scheduler").rglob("*.py"):
        assert imports(path) <= set(sys.stdlib_module_names), path
        assert not climbs_out(path, ROOT / "scheduler"), path


def test_offload_imports_torch_numpy_and_a_digest_at_most() -> None:
    for path in (ROOT / "offload").rglob("*.py"):
        assert imports(path) <= set(sys.stdlib_module_names) | {"torch", "numpy", "xxhash"}, path


@pytest.mark.parametrize("name", ["scheduler", "offload"])
def test_the_rooms_are_links_inside_the_package(name: str) -> None:
    link = ROOT / "axrt" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_nobody_but_the_command_line_deepspeeds_names_and_users_import_the_engine() -> None:
    for path in (ROOT / "axrt").rglob("*.py"):
        if {"cli", "deepspeed", "engine"} & set(path.parts) or path.name == "__init__.py":
            continue
        modules = [
            n.module or ""
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.ImportFrom)
        ]
        assert not any(f"{module}.".startswith("axrt.engine.") for module in modules), path
