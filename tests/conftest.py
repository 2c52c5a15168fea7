"""Which cases run, see `sweeps`; and in which order, where tests run side by side."""

import gc
import os
import random
import signal
import sys

import pytest
from hypothesis import settings

from . import by_folder, shards
from .sweeps import FULL

NOT_THE_REST = " and not long and not sweep"  # the end of what pyproject.toml selects
# What waits a lot begins, beside what computes; what is short fills the end.
IN_ORDER = (
    "tests/slurm/",
    "tests/network/",
    "tests/mpi/test_failures",
    "tests/gpu/",
    "tests/mpi/test_runs",
    "tests/engine/",
    "tests/mpi/",
    "tests/device/",
    "tests/attacks/",
    "tests/",
)
# Several run at once. And a child of fork would wait for ever for the threads that torch had.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where nothing may write bytecode, each rank of each job compiles all of axrt anew, a fifth of what
# its start takes, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
settings.register_profile("axrt", deadline=None)  # other tests may run beside this one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="N/OF", help="take one piece of several, such as 2/6")
    parser.addoption("--by-folder", action="store_true", help="say at the end what was found")


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


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup() -> None:
    """Chance is the same for each test, whichever ran before it in this process."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def pytest_collection_finish() -> None:
    """What has been imported by now stays: a collection of garbage, of which some tests ask for
    many, need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # when marks have left out what they do
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shard:
        take_piece(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(
            key=lambda item: next(
                at for at, start in enumerate(IN_ORDER) if item.nodeid.startswith(start)
            )
        )


def take_piece(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases of one piece of the run."""
    try:
        number, of = shards.read(config.option.shard)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    kept = shards.shards([item.nodeid for item in items], of)[number - 1]
    others = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    config.hook.pytest_deselected(items=others)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.option.by_folder:
        terminalreporter.section("by folder")
        for line in by_folder.told(terminalreporter.stats):
            terminalreporter.write_line(line)
