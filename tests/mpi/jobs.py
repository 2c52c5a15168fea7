"""What the cases of a module said, and how trials ended, each on the ranks of one job."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from ..sweeps import FULL, is_full
from .mpirun import Ended, mpirun
from .trials import TRIALS, Told, Trial

DEVICE = "AXRT_TEST_DEVICE"  # the environment's variable that says where cases compute
CASE_S = 900  # a hang: a case takes a minute at most, and most a tenth of a second


@cache
def _results_of(module: str, ranks: int, device: str, all_ways: bool) -> Mapping[str, str]:
    out = Path(mkdtemp()) / "results.json"
    ended = mpirun(
        ranks,
        ["-m", "tests.mpi.runner", module, str(out)],
        timeout_s=3600,  # no measure of a hang: the runner ends a case that takes `CASE_S`
        extra=_variables(device, all_ways),
    )
    results: dict[str, str] = json.loads(out.read_text()) if out.exists() else {}
    for failed in out.parent.glob("*.failed"):
        results[failed.suffixes[-2].lstrip(".")] = failed.read_text()
    return (
        results
        if ended.code == 0 or any(results.values())
        else {**results, "job": f"code {ended.code}\n{ended.err}"}
    )


def _variables(device: str, all_ways: bool) -> dict[str, str]:
    # The workspace with which cuBLAS repeats itself.
    cublas = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {DEVICE: device, FULL: "yes" if all_ways else "no", **cublas}


def said(
    module: str, ranks: int, case: str, device: str = "cpu", all_ways: bool | None = None
) -> str:
    """What the case of a module said on a job of so many ranks: nothing where it holds.

    Args:
        module, ranks, case, device: what runs, and where; all cases of a module have one job.
        all_ways: cases go through all their ways, and not a few of them; None: in the full run.
    """
    results = _results_of(module, ranks, device, is_full() if all_ways is None else all_ways)
    return results.get(case, results.get("job", "did not run: an earlier case ended the job"))


@cache
def ends(
    ranks: int, trials: tuple[Trial, ...], extra: tuple[tuple[str, str], ...] = ()
) -> Mapping[str, Ended]:
    """How trials would have ended their jobs; they are tried on the ranks of one.

    Args:
        ranks: number of ranks.
        trials: what they do, one after the other.
        extra: variables of the job's environment.
    Returns:
        The end of each by its name: the code of the job, and what all ranks have printed. What no
        rank came to has a code of -1.
    """
    folder = Path(mkdtemp())
    placed = [replace(trial, folder=trial.folder or mkdtemp()) for trial in trials]
    (folder / TRIALS).write_text(json.dumps([asdict(trial) for trial in placed]))
    job = mpirun(ranks, ["-m", "tests.mpi.trials", str(folder)], timeout_s=3600, extra=dict(extra))
    files = sorted(folder.glob("*.json"), key=lambda file: file.name)
    of_ranks = [json.loads(file.read_text()) for file in files if file.name != TRIALS]
    missing = Ended(-1, "", f"did not run: code {job.code}\n{job.out}\n{job.err}", 0.0)
    return {
        trial.name: _whole([Told(**of[trial.name]) for of in of_ranks])
        if len(of_ranks) == ranks and all(trial.name in of for of in of_ranks)
        else missing
        for trial in trials
    }


def _whole(told: list[Told]) -> Ended:
    """The end of a job, by what its ranks have told."""
    aborts = [of.code for of in told if of.how == "aborts"]
    code = aborts[0] if aborts else max(of.code for of in told)
    out, err = ("".join(getattr(of, name) for of in told) for name in ("out", "err"))
    return Ended(code, out, err, 0.0)
