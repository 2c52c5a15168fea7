"""Commands of launchers, in parts, and what launchers say of ranks that have died."""

import pytest

from axrt.errors import ConfigError
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
        (("srun", *TRAIN), 0),
        (TRAIN, 0),
    ],
)
def test_a_command_is_taken_apart_and_put_together(words: tuple[str, ...], ranks: int) -> None:
    command = Command.of(words)
    assert (command.ranks, command.file, command.overrides) == (ranks, "my.toml", TRAIN[3:])
    assert sorted(command.words(ranks, [], [])) == sorted(words)
    more = command.words(2, ["--host", "a"], ["checkpoint.resume=auto"])
    assert more[-3:] == ["my.toml", "run.steps=5", "checkpoint.resume=auto"]
    assert ("--host" in more) == bool(command.launcher)


def test_going_back_at_every_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="goes on from the newest checkpoint at every start"):
        Command.of(("mpirun", "-n", "2", *TRAIN, "checkpoint.resume=runs/a"))
    Command.of(("mpirun", "-n", "2", *TRAIN, "checkpoint.resume=auto"))


def test_each_launcher_takes_hosts_in_its_own_way() -> None:
    assert MPICH.on(HOSTS) == ["-hosts", "a:4,b:2"]
    assert OPEN_MPI.on(HOSTS) == ["--host", "a:4,b:2"]
    assert SRUN.on(HOSTS) == ["--nodelist=a,b", "--nodes=2"]


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
