"""Commands of launchers, in parts, and what launchers say of ranks that have died."""

import pytest

from axrt.restarts.hosts import Host
from axrt.restarts.launcher import MPICH, OPEN_MPI, SRUN, Command, launcher_of

HOSTS = [Host("a", 4), Host("b", 2)]
TRAIN = ("axrt", "train", "my.toml", "run.steps=5")


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("mpirun", "-n", "8", *TRAIN), 8),
        (("mpirun", "-np", "8", "python", "-m", *TRAIN), 8),
        (("srun", "--mpi=pmi2", "--ntasks", "4", "/env/bin/python", "-m", *TRAIN), 4),
        (("srun", "-c", "4", "--ntasks=12", *TRAIN), 12),
        (("mpirun", "-c", "8", *TRAIN), 8),
        (("mpirun", "-n", "8", "numactl", "--interleave=all", *TRAIN), 8),
        (("srun", *TRAIN), 0),
        (TRAIN, 0),
    ],
)
def test_a_command_is_taken_apart_and_put_together(words: tuple[str, ...], ranks: int) -> None:
    command = Command.of(words)
    assert (command.ranks, command.file, command.overrides) == (ranks, "my.toml", TRAIN[3:])
    assert command.words(ranks, [], []) == list(words)
    more = command.words(2, ["--host", "a"], ["checkpoint.resume=auto"])
    placed = ["--host", "a"] if words[0] != "axrt" else []
    fewer = [word.replace(str(ranks), "2") if ranks else word for word in words]
    assert more == [fewer[0], *placed, *fewer[1:], "checkpoint.resume=auto"]


@pytest.mark.parametrize(
    "words",
    [
        ("mpirun", "-n", "8", "./my_script.py", "-n", "3"),
        ("mpirun", "-n", "8", "python3.12", "my_script.py", "train", "conf.yaml"),
        ("mpirun", "--mca", "btl", "self,tcp", "-np", "8", "env", "A=1", "python", "-c", "8"),
    ],
)
def test_a_script_of_ones_own_stays_as_it_is(words: tuple[str, ...]) -> None:
    command = Command.of(words)
    assert (command.ranks, command.file) == (8, "")
    assert command.words(8, [], []) == list(words)
    assert command.words(5, ["--host", "a"], [])[:3] == ["mpirun", "--host", "a"]
    assert command.words(5, [], []).count("5") == 1


def test_each_launcher_takes_hosts_in_its_own_way() -> None:
    assert MPICH.on(HOSTS) == ["-hosts", "a:4,b:2"]
    told = ["-x", "AXRT_EXIT_FILE", "-x", "AXRT_WITNESSES"]
    assert OPEN_MPI.on(HOSTS) == [*told, "--host", "a:4,b:2"]
    assert SRUN.on(HOSTS) == ["--kill-on-bad-exit=1", "--nodelist=a,b", "--nodes=2"]
    assert (MPICH.on([]), OPEN_MPI.on([]), SRUN.on([])) == ([], told, ["--kill-on-bad-exit=1"])


def test_launchers_are_told_apart() -> None:
    assert launcher_of("/usr/bin/srun", "slurm 23.02") is SRUN
    assert launcher_of("mpirun", "HYDRA build details:") is MPICH
    assert launcher_of("mpirun", "mpirun (Open MPI) 5.0.11") is OPEN_MPI
    assert launcher_of("mpirun", "something else") is None


def test_what_launchers_say_of_a_lost_rank_names_its_host() -> None:
    assert MPICH.lost("=   PID 4711 RUNNING AT node-7\n") == ["node-7"]
    assert MPICH.lost("=   EXIT CODE: 9\n") == []
    said = "prterun noticed that process rank 1 with PID 4711 on node node-7 exited on signal 9\n"
    assert OPEN_MPI.lost(said) == ["node-7"]
    assert SRUN.lost("srun: error: node-7: task 5: Killed\n") == ["node-7"]
    assert SRUN.lost("srun: error: node-7: tasks 4-5: Killed\n") == ["node-7"]
    assert SRUN.lost("srun: error: node-7: task 5: Exited with exit code 2\n") == []
