"""What another user of a host may do beside a run: nothing of it is read, trusted or removed."""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn

import axrt
from axrt.checkpoint.durable import write_durably
from axrt.checkpoint.folder import check_writable
from axrt.checkpoint.host_memory import HostMemory, Part
from axrt.checkpoint.lock import DirectoryLock
from axrt.checkpoint.memory_run import NAME, MemoryRun
from axrt.checkpoint.private import make_private, why_not_private
from axrt.cli import main
from axrt.errors import ConfigError
from axrt.observe.activity import Activity
from axrt.observe.inspection import Inspection, _Question
from axrt.restarts.launcher import Command
from axrt.restarts.supervisor import Supervisor
from axrt.transport.local import LocalWorld

from ..cli.test_train import TINY

RUN, MARK, OTHER = "7d31c6f09a44", "1f77a0c2", 65534
PART = Part(4, 0, 1)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which every user may write, as /dev/shm is."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        place = Path(made, "shm")
        place.mkdir()
        place.chmod(0o1777)
        yield place


def as_another(act: Callable[[], object]) -> int:
    """Act as another user, in a process of its own; its exit code, 1 where it may not."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            act()
            os._exit(0)
        except OSError:
            os._exit(1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def memory(shared: Path) -> HostMemory:
    return HostMemory(shared, RUN, "node-0", MARK)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@needs_root
def test_a_link_that_another_user_has_made_first_leads_to_nothing_that_is_removed(
    shared: Path,
) -> None:
    victim = shared.parent / "victim"
    (victim / "0a0b0c0d" / "step-00000001").mkdir(parents=True)
    (victim / "thesis").mkdir()
    before = names_in(victim)
    top = shared / f"axrt-{RUN}"

    def first() -> None:
        top.mkdir()
        (top / "node-0").symlink_to(victim)

    assert as_another(first) == 0
    here = memory(shared)
    here.drop_older(9)
    here.drop_step(1)
    here.drop()
    assert list(here.whole(0, 1)) == []
    with pytest.raises(PermissionError, match=f"it belongs to user {OTHER}, and this process to u"):
        here.begin(PART)
    assert names_in(victim) == before


@needs_root
def test_copies_that_another_user_has_forged_are_not_taken(shared: Path) -> None:
    real = memory(shared)
    written = real.begin(PART)
    (written / "manifest.json").write_text("{}")
    top = shared / f"axrt-{RUN}"
    shutil.chown(top, OTHER, OTHER)  # as if he had made it with the same content
    for path in top.rglob("*"):
        shutil.chown(path, OTHER, OTHER)
    assert why_not_private(top)
    assert list(real.whole(0, 1)) == []


@needs_root
def test_copies_are_readable_by_nobody_else(shared: Path) -> None:
    written = memory(shared).begin(PART)
    (written / "layer").write_text("weights")
    (shared / "mine").write_text("")
    assert as_another((shared / "mine").read_text) == 0, "he may read there"
    assert as_another((written / "layer").read_text) == 1
    MemoryRun(RUN, MARK).write(shared)
    assert stat.S_IMODE((shared / NAME).stat().st_mode) == 0o600


@pytest.mark.parametrize("made", ["a link", "a file", "a directory that others read"])
def test_what_is_in_the_place_of_a_run_is_looked_at(shared: Path, made: str) -> None:
    top = shared / f"axrt-{RUN}"
    if made == "a link":
        (shared / "elsewhere").mkdir()
        top.symlink_to(shared / "elsewhere")
    elif made == "a file":
        top.write_text("")
    else:
        top.mkdir(0o777)
        make_private(top)
        assert stat.S_IMODE(top.stat().st_mode) == 0o700
        return
    with pytest.raises(PermissionError):
        make_private(top)
    memory(shared).drop()
    assert top.exists()


def test_where_others_may_put_another_directory_in_its_place_nothing_is_kept(shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="which has no sticky bit"):
        memory(shared).begin(PART)


@needs_root
def test_whoever_owns_the_place_may_swap_what_is_in_it_so_nothing_is_kept(shared: Path) -> None:
    shutil.chown(shared, OTHER)
    with pytest.raises(PermissionError, match=f"user {OTHER}, whose .* is, may put another one"):
        memory(shared).begin(PART)


def test_what_is_none_of_a_runs_own_stays(shared: Path) -> None:
    here = memory(shared)
    here.begin(PART)
    strays = [
        here.path_of(PART).parent.with_name("step-mine"),
        here.path_of(PART).parent.parent.with_name("notes"),
    ]
    for stray in strays:
        stray.mkdir()
    here.drop_older(9)
    here.drop()
    assert all(stray.exists() for stray in strays[1:])
    assert not here.path_of(PART).parent.exists()


FACTORY = """
import axrt
from torch import nn


class Told(nn.Embedding):
    pass


def of(config):
    open("ran", "w").close()
    layers = [axrt.LayerSpec(Told, 256, 8), axrt.LayerSpec(nn.Linear, 8, 256)]
    return axrt.PipelineModule(layers, loss)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
"""
SMALL = ("run.steps=1", "run.device=cpu", "model.context=8", "data.held_out=0", "run.out=run")


def test_no_code_runs_because_a_run_of_somebody_elses_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint once had whatever module lay in the current directory imported."""
    monkeypatch.chdir(tmp_path)
    Path("of_mine.py").write_text(FACTORY)
    Path("text.txt").write_text("all work and no play " * 40)
    Path("x.toml").write_text("")
    keys = ("data.source=text.txt", "model.factory=of_mine:of", "schedule.microbatches=1")
    trained = CliRunner().invoke(main, ["train", "x.toml", *SMALL, *keys])
    assert trained.exit_code == 0, trained.output
    Path("ran").unlink()
    spoken = ["generate", "run", "--tokens", "2"]
    assert CliRunner().invoke(main, spoken).exit_code == 0, "a run of one's own"
    Path("ran").unlink()
    (checkpoint,) = Path("run/checkpoints").glob("step-*")
    shutil.copytree(checkpoint, "theirs")
    Path("theirs.txt").write_text("")
    refused = CliRunner().invoke(main, ["generate", "theirs", "--tokens", "2"])
    assert refused.exit_code == 2, refused.output
    assert "expected --model-factory of_mine:of, or factory" in refused.output
    assert not Path("ran").exists()
    named = ["generate", "theirs", "--tokens", "2", "--model-factory", "of_mine:of"]
    assert CliRunner().invoke(main, named).exit_code == 0
    if os.geteuid() == 0:
        Path("ran").unlink()
        shutil.chown("run/config.toml", OTHER)
        assert CliRunner().invoke(main, spoken).exit_code == 2
        assert not Path("ran").exists()


@needs_root
@pytest.mark.parametrize("made", ["a link", "a file", "a pipe"])
def test_what_another_user_puts_where_a_launch_keeps_its_lock_is_refused(
    shared: Path, made: str
) -> None:
    (shared.parent / "thesis").write_text("all of it")
    lock = shared / ".mine.launch"
    make: dict[str, Callable[[], object]] = {
        "a link": lambda: lock.symlink_to(shared.parent / "thesis"),
        "a file": lock.touch,
        "a pipe": lambda: os.mkfifo(lock),
    }
    assert as_another(make[made]) == 0
    supervisor = Supervisor(Command.of(["true"]), 1, None, 0, shared / "mine")
    with pytest.raises(ConfigError, match=r"it is a (link|pipe)|belongs to user 65534"):
        supervisor.until_done()
    assert (shared.parent / "thesis").read_text() == "all of it"


@needs_root
def test_links_in_the_place_of_a_runs_own_files_are_not_written_through(shared: Path) -> None:
    """As whoever may write to the directory of a run could put there."""
    (shared.parent / "thesis").write_text("all of it")
    assert as_another(lambda: (shared / ".lock").symlink_to(shared.parent / "thesis")) == 0
    with pytest.raises(OSError, match="it is a link"):
        DirectoryLock(shared)
    assert as_another(lambda: (shared / "a.new").symlink_to(shared.parent / "thesis")) == 0
    write_durably(shared / "a", b"mine")
    assert (shared / "a").read_bytes() == b"mine"
    assert (shared.parent / "thesis").read_text() == "all of it"


HERE = ("run.out=shared/run", "run.steps=2", "checkpoint.every=1", "data.held_out=0")


@pytest.fixture
def started(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run with checkpoints, in a directory in which every user may write."""
    monkeypatch.chdir(shared.parent)
    Path("text.txt").write_text("all work and no play " * 20)
    Path("tiny.toml").write_text(TINY)
    shared.rename("shared")
    assert CliRunner().invoke(main, ["train", "tiny.toml", *HERE]).exit_code == 0
    os.chmod("shared/run", 0o1777)
    Path("victim").mkdir()
    Path("victim/thesis").write_text("all of my thesis")
    yield Path("shared/run").absolute()
    Path("shared").rename(shared)


@needs_root
@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl"])
def test_nothing_is_appended_to_what_a_link_leads_to(started: Path, name: str) -> None:
    (started / name).unlink()
    thesis = Path("victim/thesis").absolute()
    assert as_another(lambda: (started / name).symlink_to(thesis)) == 0
    goes_on = ["train", "tiny.toml", *HERE, "checkpoint.resume=auto", "run.steps=3"]
    result = CliRunner().invoke(main, goes_on)
    assert result.exit_code == 2
    assert f"{name}: it is a link" in result.output
    assert thesis.read_text() == "all of my thesis"


@needs_root
def test_checkpoints_behind_a_link_of_another_users_are_not_taken_and_not_removed(
    started: Path,
) -> None:
    kept = names_in(started / "checkpoints")
    place = started.parent / "mine"

    def first() -> None:
        place.mkdir()
        (place / "checkpoints").symlink_to(started / "checkpoints")

    assert as_another(first) == 0
    goes_on = ["run.out=shared/mine", "checkpoint.resume=auto", "run.steps=9"]
    result = CliRunner().invoke(main, ["train", "tiny.toml", *HERE, *goes_on])
    assert result.exit_code == 2
    assert f"is a link that user {OTHER} has made" in result.output
    assert names_in(started / "checkpoints") == kept
    model = axrt.PipelineModule([nn.Linear(2, 2)], nn.functional.mse_loss)
    alone = LocalWorld(1).alone()
    with (
        pytest.raises(ConfigError, match=f"is a link that user {OTHER} has made"),
        axrt.initialize(model, transport=alone) as engine,
    ):
        engine.own_checkpoints(place / "checkpoints")
    assert names_in(started / "checkpoints") == kept


@needs_root
def test_probes_have_names_that_nobody_knows_before(started: Path) -> None:
    thesis = Path("victim/thesis").absolute()
    folder = started / "checkpoints"
    folder.chmod(0o1777)

    def first() -> None:
        for place in (started, folder):
            for name in (".lock", ".writable"):
                (place / f"{name}-{os.getppid()}").symlink_to(thesis)

    assert as_another(first) == 0
    check_writable(folder)
    (started / ".lock").write_text('{"host": "elsewhere", "pid": 1}')
    os.utime(started / ".lock", (1, 1))
    DirectoryLock(started).release()
    assert thesis.read_text() == "all of my thesis"


@needs_root
@pytest.mark.parametrize("what", ["the question", "all questions"])
def test_an_answer_does_not_leave_the_run(started: Path, what: str) -> None:
    victim = Path("victim").absolute()
    (victim / "q").mkdir()
    (victim / "q" / "question").write_text("{}")
    inspection = Inspection(0, 1, Activity())
    questions = started / ".inspect"
    if what == "all questions":
        questions.symlink_to(victim)
    else:
        questions.mkdir()
        (questions / "q").symlink_to(victim / "q")
    question = _Question.read(questions / "q" / "question")
    assert question is not None
    inspection._question = question
    inspection._answer("computes", "", ())
    assert [path.name for path in (victim / "q").iterdir()] == ["question"]


@needs_root
def test_code_that_a_file_of_another_users_names_is_named_on_the_command_line(
    started: Path,
) -> None:
    file = Path("theirs.toml")
    file.write_text(TINY.replace("[model]", '[model]\nfactory = "of_theirs:model"'))
    os.chown(file, OTHER, OTHER)
    for command in ("train", "memory", "profile"):
        result = CliRunner().invoke(main, [command, str(file)])
        assert result.exit_code == 2
        assert "expected model.factory=of_theirs:model on the command line" in result.output
    named = CliRunner().invoke(main, ["memory", str(file), "model.factory=of_theirs:model"])
    assert "No module named 'of_theirs'" in named.output


def test_no_file_is_unpickled_or_evaluated() -> None:
    """Only messages between the ranks of one job are pickled."""
    unsafe = re.compile(r"\b(pickle|torch|marshal)\.loads?\(|(?<![.\w])(eval|exec)\(")
    root = Path(__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for folder in ("axrt", "scheduler", "offload")
        for path in (root / folder).rglob("*.py")
        if unsafe.search(path.read_text())
    }
    assert found == {"axrt/transport/wire.py"}
