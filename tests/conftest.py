"""Which cases run, see `sweeps` and `shards`; in which order, where tests run side by side; and
what the full run has found."""

import gc
import os
import signal
from collections import Counter, defaultdict

import pytest
from hypothesis import settings

from .shards import read_shard, shards_of
from .sweeps import FULL

NOT_THE_REST = " and not long and not sweep"  # the end of what pyproject.toml selects
# What waits a lot begins, beside what computes; what is short fills the end.
IN_ORDER = (
    "tests/slurm/",
    "tests/mpi/test_failures",
    "tests/gpu/",
    "tests/engine/",
    "tests/mpi/",
    "tests/attacks/",
    "tests/",
)
# Several run at once. And a child of fork would wait for ever for the threads that torch had.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("axrt", deadline=None)  # other tests may run beside this one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="", help="the piece of the run, as in 2/6; default: all")


def pytest_configure(config: pytest.Config) -> None:
    """A test that is named by its id has its cases of the full run, which leaves no sweep out; on a
    GPU loops within a test go through all they have."""
    if any("::" in argument for argument in config.args):
        config.option.markexpr = config.option.markexpr.removesuffix(NOT_THE_REST)
    full = "yes" if "not gpu" in config.option.markexpr else "all"
    os.environ[FULL] = "no" if "not sweep" in config.option.markexpr else full
    settings.load_profile("axrt")
    # A shell's background jobs ignore Ctrl-C, as would all that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What has been imported by now stays: a collection of garbage, of which some tests ask for
    many, need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # when marks have left out what they leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shard:
        _leave_to_other_shards(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(
            key=lambda item: next(
                at for at, start in enumerate(IN_ORDER) if item.nodeid.startswith(start)
            )
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line a folder, and why cases were skipped, in the full run."""
    if os.environ[FULL] == "no":
        return
    found: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            folder, _, _ = report.nodeid.partition("::")[0].rpartition("/")
            found[folder][outcome] += 1
            if outcome == "skipped":
                *_, reason = report.longrepr
                reasons[reason.removeprefix("Skipped: ")] += 1
    terminalreporter.section("what was found")
    for folder, counts in sorted(found.items()):
        told = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
        terminalreporter.write_line(f"{folder:24} {told}")
    for reason, number in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {number:4}: {reason}")


def _leave_to_other_shards(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        shard, shards = read_shard(config.option.shard)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    files = [item.nodeid.partition("::")[0] for item in items]
    shard_of = shards_of(Counter(files), shards)
    pairs = list(zip(items, files, strict=True))
    others = [item for item, file in pairs if shard_of[file] != shard]
    items[:] = [item for item, file in pairs if shard_of[file] == shard]
    config.hook.pytest_deselected(items=others)
