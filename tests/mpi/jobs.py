"""What the cases of a module said, each on the ranks of one job."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from .mpirun import COMPILES, mpirun

DEVICE = "AXRT_TEST_DEVICE"  # the environment's variable that says where cases compute
CASE_S = 900  # the seconds after which a case counts as hung, many times what it takes


@cache
def _results_of(module: str, ranks: int, device: str, cases: tuple[str, ...]) -> Mapping[str, str]:
    out = Path(mkdtemp()) / "results.json"
    ended = mpirun(
        ranks,
        ["-m", "tests.mpi.runner", module, str(out), *cases],
        timeout_s=3600,  # no measure of a hang: the runner ends a case that takes `CASE_S`
        extra=_variables(module, device),
    )
    results: dict[str, str] = json.loads(out.read_text()) if out.exists() else {}
    for failed in out.parent.glob("*.failed"):
        results[failed.suffixes[-2].lstrip(".")] = failed.read_text()
    return (
        results
        if ended.code == 0 or any(results.values())
        else {**results, "job": f"code {ended.code}\n{ended.err}"}
    )


def _variables(module: str, device: str) -> dict[str, str]:
    # Torch imports its compiler also where kernels are to repeat themselves.
    compiles = {COMPILES: "yes"} if module in ("tests.gpu.cases", "tests.device.cases") else {}
    # The workspace with which cuBLAS repeats itself.
    return {DEVICE: device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **compiles}


def said(
    module: str, ranks: int, case: str, device: str = "cpu", shared: tuple[str, ...] = ()
) -> str:
    """What the case of a module said on a job of so many ranks: nothing where it holds.

    Args:
        module, ranks, case, device: what runs, and where.
        shared: cases that have the job together; (): all that the module has for so many ranks.
    """
    results = _results_of(module, ranks, device, shared)
    return results.get(case, results.get("job", "did not run: an earlier case ended the job"))
