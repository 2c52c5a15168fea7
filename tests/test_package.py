"""The wheel and the sdist: what is in them, that it works by itself, and what its types say."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
USER = """
import axrt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

def main() -> None:
    model = axrt.PipelineModule([axrt.LayerSpec(nn.Linear, 4, 3)], cross_entropy)
    with axrt.initialize(model, config={"run": {"device": "cpu"}}) as engine:
        loss: float = engine.step
        reveal_type(engine.step)
"""


def run(*words: str, cwd: Path = ROOT, **extra: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **extra}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel that was built from an sdist, which was built from the files that
    git knows."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (source / name).symlink_to(os.readlink(ROOT / name))
            else:
                (source / name).write_bytes((ROOT / name).read_bytes())
    quiet = ("-m", "pip", "-q", "--disable-pip-version-check")
    if find_spec("build") is None:
        pytest.skip("`build` is not installed")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, *quiet, "install", "--no-deps", "--target", str(folder / "in"), str(wheel))
    return folder


def test_links_are_files_in_both(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as of_wheel:
        names = set(of_wheel.namelist())
    with tarfile.open(sdist) as of_sdist:
        links = [one.name for one in of_sdist.getmembers() if one.issym() or one.islnk()]
    expected = {"axrt/scheduler/simulation/simulator.py", "axrt/offload/tier.py", "axrt/py.typed"}
    assert expected | {"axrt/clusters/pretrain.sbatch"} <= names
    assert not [name for name in names if name.startswith(("tests/", "scheduler/"))]
    assert links == []


def test_it_works_away_from_the_checkout(built: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text("[model]\nlayers = 1\nwidth = 8\nheads = 1\n")
    env = {"PYTHONPATH": str(built / "in"), "OMP_NUM_THREADS": "1"}
    where = run(sys.executable, "-c", "import axrt; print(axrt.__file__)", cwd=tmp_path, **env)
    assert where.startswith(str(built / "in"))
    axrt = (sys.executable, "-m", "axrt")
    said = run(
        *axrt,
        "simulate",
        *["--policy", "1f1b", "--ranks", "2", "--microbatches", "4"],
        cwd=tmp_path,
        **env,
    )
    assert "1f1b" in said
    run(*axrt, "train", "tiny.toml", "run.steps=2", "run.device=cpu", cwd=tmp_path, **env)
    script = run(*axrt, "slurm", "tiny.toml", "--dry-run", cwd=tmp_path, **env)
    assert "scontrol requeue" in script
    assert ", version 0." in run(*axrt, "--version", cwd=tmp_path, **env)


@pytest.mark.long
def test_a_site_without_a_network_installs_it_from_a_wheelhouse(
    built: Path, tmp_path: Path
) -> None:
    """The wheel and then the sdist, into an empty environment, with nothing but a directory."""
    wheels, python = tmp_path / "wheels", str(tmp_path / "env/bin/python")
    asked = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(tmp_path),
        "click",
    )
    if subprocess.run(asked, capture_output=True, timeout=120).returncode:
        pytest.skip("no index of packages can be reached")
    run("scripts/wheelhouse", str(wheels), AXRT_PYTHON=sys.executable)
    run(sys.executable, "-m", "venv", str(tmp_path / "env"))
    alone = (python, "-m", "pip", "-q", "install", "--no-index", "--find-links", str(wheels))
    run(*alone, "axrt[mpich]", cwd=tmp_path)
    (tmp_path / "tiny.toml").write_text("[model]\nlayers = 2\nwidth = 8\nheads = 1\n")
    plain = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    axrt, mpirun = (str(tmp_path / "env/bin" / name) for name in ("axrt", "mpirun"))
    train = (axrt, "train", "tiny.toml", "run.steps=2", "run.device=cpu")
    assert "step 2/2" in run(mpirun, "-n", "2", *train, cwd=tmp_path, **plain)
    (sdist,) = built.glob("*.tar.gz")
    run(python, "-m", "pip", "-q", "uninstall", "-y", "axrt")
    run(*alone, str(sdist), cwd=tmp_path)
    assert "step 2/2" in run(*train, cwd=tmp_path, **plain)


@pytest.mark.long
def test_a_users_types_are_checked_against_it(built: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER)
    told = run(
        *(sys.executable, "-m", "mypy", "--strict", "--no-incremental", "mine.py"),
        cwd=tmp_path,
        MYPYPATH=str(built / "in"),
    )
    assert 'Revealed type is "int"' in told or 'Revealed type is "builtins.int"' in told
