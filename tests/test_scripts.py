"""What the scripts say when something is missing: one line, before anything is made."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from .conftest import NOT_THE_REST

ROOT = Path(__file__).resolve().parent.parent
GOOD_PYTHON = "#!/bin/sh\nexit 0\n"
WITHOUT_VENV = '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\nexit 0\n'
FULL_DISK = "#!/bin/sh\necho Filesystem\necho /dev/disk 9 9 1024 99% /\n"


@pytest.mark.parametrize(
    ("stubs", "mpi", "line"),
    [
        ({}, "lam", "axrt: AXRT_MPI=lam; expected mpich, openmpi or system"),
        ({}, "system", "axrt: AXRT_MPI=system, but there is no mpirun on the PATH"),
        ({}, "mpich", "axrt: AXRT_PYTHON=nothing; expected a Python >= 3.11 with torch and mpi4py"),
        ({"python3": "#!/bin/sh\nexit 1\n"}, "mpich", "axrt: no Python >= 3.11 found"),
        (
            {"python3": WITHOUT_VENV},
            "mpich",
            "axrt: python3 has no venv module; install it (Debian: apt install python3-venv)",
        ),
        ({"python3": GOOD_PYTHON, "df": FULL_DISK}, "mpich", "axrt: 1 MiB free in "),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, stubs: dict[str, str], mpi: str, line: str
) -> None:
    checkout, tools = tmp_path / "axrt", tmp_path / "bin"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "awk", "dirname", "df"):
        (tools / name).symlink_to(shutil.which(name) or "")
    for name, script in stubs.items():
        (tools / name).unlink(missing_ok=True)
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    environment = {"PATH": str(tools), "AXRT_MPI": mpi, "HOME": os.environ.get("HOME", "/")}
    if "AXRT_PYTHON" in line:
        environment["AXRT_PYTHON"] = "nothing"
    ended = subprocess.run(
        [checkout / "scripts" / "test"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(line), ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (checkout / ".venv").exists()


def test_types_of_an_installed_checkout_are_found() -> None:
    """An editable install is an import hook by default, which mypy cannot follow."""
    scripts = (path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file())
    installs = [line for text in scripts for line in text.splitlines() if '-e ".[' in line]
    assert len(installs) == 3
    assert all("--config-settings editable_mode=compat" in line for line in installs)


def test_the_quickstart_runs_on_a_given_python(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    shutil.copytree(ROOT / "scripts", tmp_path / "axrt" / "scripts")
    tools.mkdir()
    for name in ("mpirun", "python"):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tools / name).chmod(0o755)
    ended = subprocess.run(
        [tmp_path / "axrt" / "scripts" / "quickstart", "run.steps=1"],
        env={"PATH": os.environ["PATH"], "AXRT_PYTHON": str(tools / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    command = f"{tools}/python -m axrt train examples/quickstart.toml"
    assert ended.stdout.startswith(f"mpirun -n 2 {command} run.steps=1\n")
    assert f"{command} run.out=runs/mine" in ended.stdout


def test_wheels_for_a_node_are_of_other_packages_than_this_one(tmp_path: Path) -> None:
    """The extra `test` names another of axrt's own, which no index has."""
    pip, said = tmp_path / "python3", tmp_path / "said"
    pip.write_text(
        f"#!/bin/sh\n"
        f'[ "$2" != pip ] || {{ echo "$@" >{said}; touch {tmp_path}/wheels/one.whl; exit; }}\n'
        f'exec {sys.executable} "$@"\n'
    )
    pip.chmod(0o755)
    subprocess.run(
        [ROOT / "scripts" / "carry", tmp_path / "wheels"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        check=True,
    )
    packages = said.read_text().split()
    assert {"mpich", "pytest", "tokenizers", "setuptools>=77"} <= {*packages}
    assert not [one for one in packages if one.startswith(("axrt", "torch"))]


def runs_of_ci() -> list[tuple[str, str]]:
    """The library and the arguments of each scripts/test in .ci/run."""
    return re.findall(
        r"^AXRT_MPI=(\w+) (?:\w+=\S+ )*scripts/test ?(.*?)(?: #.*)?$",
        (ROOT / ".ci" / "run").read_text(),
        re.MULTILINE,
    )


def test_scripts_test_leaves_out_what_is_long_and_ci_runs_it_on_both_libraries() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["addopts"].endswith(f"-m 'not gpu and not exact{NOT_THE_REST}'")
    assert {"long", "sweep"} <= {mark.partition(":")[0] for mark in options["markers"]}
    first, *others = runs_of_ci()
    assert first == ("mpich", ""), "the default run"
    assert {mpi for mpi, _ in others} == {"mpich", "openmpi"}
    for _, arguments in others:
        named = [word for word in arguments.split() if word.startswith("tests/")]
        assert named, "a job of its own"
        assert all((ROOT / place).exists() for place in named), "a file has another name"


def test_the_head_of_scripts_test_is_its_help() -> None:
    told = subprocess.run(
        [ROOT / "scripts" / "test", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith("Installs axrt into .venv and runs its tests")
    assert "scripts/test --full" in told
    assert told.count("\n") == 8


def busy_below(process: int) -> list[psutil.Process]:
    """The processes that a script has made to be busy."""
    return [
        child
        for child in psutil.Process(process).children()
        if "under_load" in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_busy_processes_end_with_the_command_that_runs_beside_them(
    number: signal.Signals | None, tmp_path: Path
) -> None:
    # It is busy as well until it may end, and says that it has begun.
    command = f"touch {tmp_path}/begun; until [ -e {tmp_path}/end ]; do sleep 0.02; done; exit 7"
    script = subprocess.Popen(
        [ROOT / "scripts" / "under_load", "bash", "-c", command],
        env={**os.environ, "AXRT_BUSY": "2"},
    )
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    busy = busy_below(script.pid)
    assert len(busy) == 2
    if number is None:
        (tmp_path / "end").touch()
    else:
        script.send_signal(number)
    assert script.wait(120) == {None: 7, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    _, left = psutil.wait_procs(busy, timeout=120)
    assert left == []
