"""How ranks come up, read from environments that launchers make."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from axrt import ConfigError, LaunchError
from axrt.device.device import CPU, agreed, identity
from axrt.world.launchers import Told, check_launcher, check_world, told
from axrt.world.mpi_library import check_knows_launcher
from axrt.world.survivors import can_survive, in_places


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            Told("Open MPI's mpirun", 1, 4, 1),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, Told("mpirun (PMI)", 2, 4, 0)),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"},
            Told("srun", 3, 8, 1),
        ),
        # A batch script carries SLURM_NTASKS, and everything that is started from it.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        # Open MPI starts its daemons through srun, and ranks inherit the daemons' variables.
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
            },
            Told("Open MPI's mpirun", 5, 8, None),
        ),
        (
            {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1@1"},
            Told("prterun (PMIx)", 1, None, None),
        ),
        (
            {"PMIX_RANK": "3", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"},
            Told("srun", 3, 8, None),
        ),
    ],
)
def test_what_a_launcher_says(environment: dict[str, str], expected: Told | None) -> None:
    assert told(environment) == expected


SCRIPT = """
import axrt, torch
model = axrt.PipelineModule([torch.nn.Linear(2, 2)], torch.nn.functional.mse_loss)
axrt.initialize(model)
"""


def test_ranks_that_torchrun_has_started_are_refused_with_the_line_that_starts_them(
    tmp_path: Path,
) -> None:
    """Each once trained a whole model of its own, with code 0."""
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*torchrun, "train.py", "--steps", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode != 0
    assert "expected mpirun -n 2 python train.py --steps 3" in ended.stderr


@pytest.mark.parametrize(
    ("said", "environment", "is_refused"),
    [
        (None, {"RANK": "0", "WORLD_SIZE": "2"}, True),
        (Told("srun", 0, 1, 0), {"RANK": "1", "WORLD_SIZE": "8"}, True),
        (None, {"RANK": "0", "WORLD_SIZE": "1"}, False),
        (None, {"WORLD_SIZE": "2"}, False),
        (None, {"RANK": "0", "WORLD_SIZE": "many"}, False),
        # A script that starts a process group of its own under mpirun sets them, too.
        (Told("mpirun (PMI)", 1, 2, 1), {"RANK": "1", "WORLD_SIZE": "2"}, False),
        (Told("prterun (PMIx)", 1, None, None), {"RANK": "1", "WORLD_SIZE": "2"}, False),
    ],
)
def test_a_launcher_of_torch_counts_where_none_of_mpi_has_started_the_job(
    said: Told | None, environment: dict[str, str], is_refused: bool
) -> None:
    with pytest.raises(LaunchError) if is_refused else nullcontext():
        check_launcher(said, environment)


def test_a_world_as_the_launcher_meant_it_is_fine() -> None:
    check_world(None, rank=0, size=1)
    check_world(Told("srun", 3, 8, 1), rank=3, size=8)


def test_many_worlds_of_one_are_refused() -> None:
    with pytest.raises(
        LaunchError,
        match="srun started this process as rank 3 of 8, but MPI came up as rank 0 of 1",
    ):
        check_world(Told("srun", 3, 8, 1), rank=0, size=1)


def test_a_launcher_that_does_not_say_the_size_is_believed_where_ranks_agree() -> None:
    check_world(Told("prterun (PMIx)", 0, None, None), rank=0, size=1)
    check_world(Told("prterun (PMIx)", 1, None, None), rank=1, size=2)
    with pytest.raises(
        LaunchError,
        match=r"prterun \(PMIx\) started this process as rank 1, but MPI came up as rank 0 of 1",
    ):
        check_world(Told("prterun (PMIx)", 1, None, None), rank=0, size=1)


MPICH, OPENMPI = (
    "MPICH Version:      5.0.2\nMPICH configure:    --with-pm=hydra{}\n",
    "Open MPI v5.0.11, package: Open MPI user@localhost\x00",
)


@pytest.mark.parametrize(
    ("version", "environment"),
    [
        (MPICH.format(""), {}),
        (MPICH.format(""), {"PMIX_RANK": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}),
        (MPICH.format(" --with-pmix=/usr"), {"PMIX_RANK": "1"}),
        (OPENMPI, {"PMIX_RANK": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}),
    ],
)
def test_a_library_that_knows_its_launcher_is_started(
    version: str, environment: dict[str, str]
) -> None:
    check_knows_launcher(version, environment)


def test_a_library_that_would_end_under_its_launcher_is_not_started() -> None:
    text = (
        "started this process as rank 1, and the MPI library is MPICH Version: 5.0.2, built "
        "without PMIx: the launcher and the MPI library"
    )
    with pytest.raises(LaunchError, match=text):
        check_knows_launcher(MPICH.format(""), {"PMIX_RANK": "1"})


def test_a_launcher_may_show_each_rank_one_gpu_of_its_own() -> None:
    """Both call it number 0."""
    mine = torch.device("cuda", 0)
    assert agreed(mine, ["a", "b"], "cuda", share=False) == mine


def test_more_ranks_than_gpus_share_only_with_leave() -> None:
    mine = torch.device("cuda", 0)
    with pytest.raises(
        ConfigError,
        match=(
            r"2 ranks on this node and 1 device; expected at most one rank a device.*"
            r"run.share_gpu = true"
        ),
    ):
        agreed(mine, ["a", "a"], "auto", share=False)
    assert agreed(mine, ["a", "a"], "auto", share=True) == mine


def test_without_gpus_the_cpu_computes_unless_another_device_was_asked_for() -> None:
    assert agreed(CPU, [""], "auto", share=False) == CPU
    assert agreed(torch.device("cuda", 0), ["a", ""], "auto", share=False) == CPU
    with pytest.raises(ConfigError, match="run.device = 'cuda', but torch sees no such device"):
        agreed(CPU, [""], "cuda", share=False)
    with pytest.raises(ConfigError, match="no such device here on 1 of 2 ranks"):
        agreed(torch.device("cuda", 0), ["a", ""], "cuda", share=False)


def test_slices_of_one_gpu_are_told_apart_by_their_names() -> None:
    mig = {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}
    assert [identity(torch.device("cuda", index), mig) for index in range(2)] == ["MIG-1", "MIG-2"]


def test_a_library_that_may_touch_devices_is_asked_by_its_file(tmp_path: Path) -> None:
    """mpi4py loads the library so that its names are hidden from the process."""
    if not (compiler := shutil.which("g++")):
        pytest.skip("needs a C++ compiler: apt-get install g++")
    source, library = tmp_path / "aware.cpp", tmp_path / "libmpi.so.12"
    source.write_text('extern "C" int MPIX_Query_cuda_support() { return 1; }')
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    script = (
        "import ctypes, sys; from axrt.world.mpi_library import is_device_aware;"
        "before = is_device_aware('cuda'); ctypes.CDLL(sys.argv[1]);"
        "print(before, is_device_aware('cuda'), is_device_aware('cpu'), is_device_aware('xpu'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, library], check=True, capture_output=True, text=True
    )
    assert told.stdout.split() == ["False", "True", "False", "False"]


def test_lost_ranks_are_survived_where_the_launcher_says_so() -> None:
    class Comm:
        def Shrink(self) -> None: ...  # noqa: N802 - as MPI calls it

    able, unable = SimpleNamespace(Comm=Comm), SimpleNamespace(Comm=object)
    told = {"OMPI_MCA_mpi_ft_enable": "1"}
    assert can_survive(able, told)
    assert not can_survive(unable, told)
    assert not can_survive(able, {})


def test_spares_take_the_places_of_those_that_are_lost() -> None:
    assert in_places([0, 2, 3, 4, 5], before=4, now=4) == [0, 4, 2, 3, 5]
    assert in_places([1, 3, 5, 4], before=4, now=4) == [5, 1, 4, 3]
    assert in_places([0, 1, 2, 3], before=4, now=4) == [0, 1, 2, 3]
    assert in_places([0, 2, 4], before=4, now=2) == [0, 2, 4]
