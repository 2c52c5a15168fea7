"""Plants faults in the device path, one at a time, and says which of them the simulated accelerator
finds; see scripts/device_mutants."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click

from tests.mpi.jobs import DEVICE

from .simulated import NAME

ROOT = Path(__file__).resolve().parents[2]
GPU, OURS = "tests.gpu.cases", "tests.device.cases"
_ACTIVATIONS = "case_activations_leave_the_device_and_come_back"
LARGE = "case_large_activations_have_the_bits"
LIBRARY = "case_a_library_adds_up_and_carries"
RESIDENCIES = "case_weights_come_from_scratch_and_go"
HANDS = "case_memory_that_changes_hands_is_recorded"


class Mutant(NamedTuple):
    """A fault.

    Args:
        fault: what is wrong, in words.
        file: file that it is planted in.
        old, new: what is replaced, found once, and by what.
        module, case, ranks: what is to find it.
    """

    fault: str
    file: str
    old: str
    new: str
    module: str
    case: str
    ranks: int = 2


MUTANTS = [
    Mutant(
        "what was on the sender's host is put on the device",
        "axrt/transport/staging.py",
        "tensor if layout.spec.on_host else self._placed(tensor)",
        "self._placed(tensor)",
        GPU,
        "case_clipping_has_the_bits",
    ),
    Mutant(
        "what leaves waits for the tail of the stream",
        "axrt/transport/staging.py",
        "self._out.after(after)",
        "self._out.stream.wait_stream(current_stream(self._device))",
        OURS,
        "case_no_copy_waits_for_later_tasks",
    ),
    Mutant(
        "queues do not wait for each other",
        "axrt/device/queues.py",
        "            self.stream.wait_event(moment.event)",
        "            pass",
        GPU,
        LARGE,
    ),
    Mutant(
        "what has arrived is not recorded on the stream that computes",
        "axrt/transport/staging.py",
        "            tensor.record_stream(current_stream(self._device))",
        "            pass",
        GPU,
        LARGE,
    ),
    Mutant(
        "what has arrived is ready at once",
        "axrt/transport/mpi.py",
        "        return one.ready.passed()",
        "        return True",
        GPU,
        LARGE,
    ),
    Mutant(
        "what comes by a line is ready at once",
        "axrt/transport/mpi.py",
        "            if not one.by_line.passed():",
        "            if False:",
        OURS,
        LIBRARY,
    ),
    Mutant(
        "a collective has ended when it is issued",
        "axrt/transport/collectives.py",
        "        self._last = _All(self._issued)",
        "        self._last = _All([])",
        OURS,
        LIBRARY,
    ),
    Mutant(
        "what leaves is ready at once",
        "axrt/transport/staging.py",
        "NOW if on_host else ready",
        "NOW",
        GPU,
        LARGE,
    ),
    Mutant(
        "what has gaps is let go while it is laid out anew",
        "axrt/transport/staging.py",
        "[*sources, *tensors]",
        "tensors",
        OURS,
        "case_what_has_gaps_leaves_whole",
    ),
    Mutant(
        "pinned memory comes back while it is copied from",
        "axrt/transport/staging.py",
        "_Kept(moment, tensors) if on_device",
        "moment if on_device",
        GPU,
        "case_every_kind_of_policy_has_the_bits_of_plain_torch",
    ),
    Mutant(
        "losses are read at launch",
        "axrt/workers/losses.py",
        "        self._on_device[number] = loss.to(",
        '        float(loss.to("cpu"))\n        self._on_device[number] = loss.to(',
        GPU,
        LARGE,
    ),
    Mutant(
        "norms are read at launch",
        "axrt/store/bucket.py",
        'norms.to("cpu", non_blocking=True)',
        'norms.to("cpu", non_blocking=True).clone()',
        GPU,
        "case_clipping_has_the_bits",
    ),
    Mutant(
        "a task has ended when it is launched",
        "axrt/runtime/compute.py",
        "while self.running and self.running[0][-1].passed():",
        "while self.running:",
        GPU,
        LARGE,
    ),
    Mutant(
        "a task has ended when the host sees it",
        "axrt/runtime/compute.py",
        "timed=True), _LAUNCH_DEPTH, clock=DeviceClock())",
        "timed=True), _LAUNCH_DEPTH)",
        GPU,
        "case_a_task_has_ended_when_the_device_says_so",
        1,
    ),
    Mutant(
        "tasks do not wait for the user's stream",
        "axrt/device/queues.py",
        "        self.stream.wait_stream(users)\n",
        "",
        OURS,
        "case_what_the_user_has_launched_before_comes_first",
        1,
    ),
    Mutant(
        "the user's own batches are not recorded",
        "axrt/runtime/user_tensors.py",
        "            _record(placed)",
        "            pass",
        OURS,
        HANDS,
        1,
    ),
    Mutant(
        "what the user gets is not recorded",
        "axrt/runtime/user_tensors.py",
        "            _record(flatten(payload)[1])",
        "            pass",
        OURS,
        HANDS,
    ),
    Mutant(
        "given weights are taken over on the user's stream",
        "axrt/runtime/initial_weights.py",
        "with rank.loop.computing(), torch.no_grad():",
        "with torch.no_grad():",
        OURS,
        HANDS,
    ),
    Mutant(
        "batches are copied on the stream that computes, from where they are",
        "axrt/runtime/user_tensors.py",
        "if is_on_host(tensor) and not tensor.is_pinned():",
        "if False:",
        GPU,
        LARGE,
        1,
    ),
    Mutant(
        "tasks do not wait for the batch",
        "axrt/runtime/user_tensors.py",
        "        self._compute.queue.after(moment)\n",
        "",
        GPU,
        LARGE,
        1,
    ),
    Mutant(
        "memory that MPI writes to is filled when it already does",
        "axrt/transport/staging.py",
        "            self._in.drain()  # they fill memory that is allocated",
        "            pass",
        OURS,
        "case_a_library_that_may_touch_the_device_does",
    ),
    Mutant(
        "small tensors for the device arrive in memory that is not pinned",
        "axrt/transport/staging.py",
        "        return self._pinned.take(layout.num_bytes, layout.shaped)",
        "        return layout.allocate(CPU)",
        GPU,
        LARGE,
    ),
    Mutant(
        "ranks of one process do not wait for each other's streams",
        "axrt/transport/local.py",
        "    wait_on_device(one.after)\n",
        "",
        OURS,
        "case_ranks_in_one_process_wait_for_each_others_streams",
        1,
    ),
    Mutant(
        "norms are told when the last step has started",
        "axrt/workers/stepping.py",
        "if record.ended[task.stage] == len(self._buckets[task.stage]):",
        "if len(record.norms[task.stage]) == len(self._buckets[task.stage]):",
        GPU,
        "case_replicas_with_narrow_weights_agree",
    ),
    Mutant(
        "memory of the library's queue is not recorded where the step reads it",
        "axrt/workers/collectives.py",
        "total.record_stream(current_stream(total.device))",
        "pass",
        OURS,
        "case_a_library_adds_up_narrow_gradients",
    ),
    Mutant(
        "a slot is used again before its store has ended",
        "axrt/store/offloaded.py",
        "                self._slots.tier.write(stretch, memory)",
        "                self._slots.tier.write(stretch, memory)\n"
        "            self._slots.give(self.memory)",
        GPU,
        "case_offloaded_state_has_the_bits_of_state_on_the_device",
        1,
    ),
    Mutant(
        "activations are let go before their copy has ended",
        "axrt/store/scratch_stash.py",
        "        self._down[stage, number] = stretch",
        "        self._down[stage, number] = stretch\n        saved.let_go()",
        GPU,
        _ACTIVATIONS,
        1,
    ),
    Mutant(
        "a backward does not wait for its activations",
        "scheduler/rules/pipeline.py",
        "made = (*made, Need(Kind.RELOAD))",
        "pass",
        GPU,
        _ACTIVATIONS,
        1,
    ),
    Mutant(
        "memory of the stream that has copied is not recorded where backwards read it",
        "axrt/model/saved.py",
        "memory.record_stream(current_stream(memory.device))",
        "pass",
        GPU,
        _ACTIVATIONS,
        1,
    ),
    Mutant(
        "a step does not wait for its state",
        "scheduler/rules/replicas.py",
        "return (Need(Kind.FETCH, bucket=bucket),) if here.job.slots else ()",
        "return ()",
        GPU,
        "case_offloaded_state_has_the_bits_of_state_on_the_device",
        1,
    ),
    Mutant(
        "a step on the host does not wait for its gradient",
        "scheduler/rules/host_steps.py",
        "                Need(Kind.UNLOAD, bucket=bucket),\n",
        "                Need(Kind.SCALE, bucket=bucket),\n",
        GPU,
        "case_steps_on_the_host_have_the_bits_of_steps_on_the_device",
        1,
    ),
    Mutant(
        "a gradient leaves for the host before the device has made it",
        "scheduler/rules/host_steps.py",
        "            (Need(Kind.SCALE, bucket=bucket),),",
        "            is_whole,",
        GPU,
        "case_steps_on_the_host_have_the_bits_of_steps_on_the_device",
        1,
    ),
    Mutant(
        "whole weights are let go while the stream that computes reads them",
        "axrt/store/flat.py",
        "            self.flat.record_stream(current_stream(self.flat.device))",
        "            pass",
        GPU,
        RESIDENCIES,
        1,
    ),
    Mutant(
        "a thread does not wait for what it has launched",
        "axrt/device/thread_queue.py",
        "            current_stream(self._device).synchronize()",
        "            pass",
        GPU,
        RESIDENCIES,
        1,
    ),
    Mutant(
        "whether weights have changed is asked for at launch",
        "axrt/store/whole_weights.py",
        'found = [one.to("cpu", non_blocking=True) for one in changed]',
        "found = [one.cpu() for one in changed]",
        GPU,
        RESIDENCIES,
        1,
    ),
    Mutant(
        "shards are read by the user's stream, of which nobody hears",
        "axrt/runtime/trainer.py",
        "self._rank.user_tensors.given(found)",
        "found",
        GPU,
        "case_whole_weights_of_shards_come_and_go",
    ),
    Mutant(
        "norms are looked for on the host as soon as a gradient is on its way there",
        "axrt/store/routes.py",
        "self._here.is_shown",
        "self._here.is_here",
        GPU,
        "case_shards_have_the_bits_of_replicas_without",
    ),
    Mutant(
        "a step does not wait for the copy of its bucket that a checkpoint is written from",
        "axrt/store/loans.py",
        "                go_after(until)",
        "                pass",
        GPU,
        "case_a_step_comes_after_the_copy_of_its_bucket",
        1,
    ),
    Mutant(
        "the copy that a checkpoint is written from does not wait for the step before",
        "axrt/checkpoint/snapshot.py",
        "        queue.after(moment_of([one.live.value for one in (*later, *self._at_once)]))",
        "        pass",
        GPU,
        "case_a_step_comes_after_the_copy_of_its_bucket",
        1,
    ),
    Mutant(
        "nobody sees that weights have changed on the device",
        "axrt/store/flat.py",
        "    return torch.stack([of_columns + of_rest, of_rows - of_rest])",
        "    return torch.stack([of_columns * 0, of_rows * 0])",
        GPU,
        "case_a_layer_that_writes_to_weights_from_scratch_is_told",
        1,
    ),
]


def found(mutant: Mutant, mpirun: str) -> bool:
    """Plant a fault in a copy of the project, and run what is to find it."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "axrt"
        for name in ("axrt", "scheduler", "offload", "tests"):
            shutil.copytree(ROOT / name, tree / name, symlinks=True)
        file = tree / mutant.file
        text = file.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.fault}: not once in {mutant.file}"
        file.write_text(text.replace(mutant.old, mutant.new))
        return not _holds(tree, mutant, mpirun)


def _holds(tree: Path, mutant: Mutant, mpirun: str) -> bool:
    out = tree / "out.json"
    command = [mpirun, "-n", str(mutant.ranks), sys.executable, "-m", "tests.mpi.runner"]
    environment = {**os.environ, DEVICE: NAME, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            [*command, mutant.module, str(out), mutant.case],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=200,
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


@click.command()
@click.option("--mpirun", default="mpirun", help="the launcher")
@click.option("--only", default="", help="faults whose words contain this")
def main(mpirun: str, only: str) -> None:
    """Say which faults are found."""
    missed = 0
    for mutant in MUTANTS:
        if only in mutant.fault:
            is_found = found(mutant, mpirun)
            missed += not is_found
            print(f"{'found ' if is_found else 'MISSED'}  {mutant.fault}", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
