"""What is around every call of an engine: it is refused where the engine is closed, and an error
within ends the job on every rank."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from axrt.errors import AxrtError, ConfigError, PeerLostError, SaveError
from axrt.model.preflight import as_failure
from axrt.observe.asking import asked, table
from axrt.observe.origin import processes_of
from axrt.runtime.rank import Rank
from axrt.world.world import World

_ANSWERS_S = 3.0  # in which ranks say what they do, before the job ends


class CallGuard:
    """The calls of one engine.

    Attributes:
        closed: the engine is closed, or has failed.
        gives_back: function that gives the user's modules back when the job ends.
        lets_go: function that lets go of files, where this process may go on with another engine.
    """

    def __init__(self, rank: Rank, world: World) -> None:
        self._rank, self._world = rank, world
        self.closed = False
        self.gives_back: Callable[[], object] = lambda: None
        self.lets_go: Callable[[], object] = lambda: None

    def check_open(self) -> None:
        """Raise `AxrtError` where the engine may not be called any more."""
        if self.closed:
            raise AxrtError(
                "this engine is closed, or has failed; expected calls before close() or inside the "
                "with block"
            )

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context of calls within which the loop runs: every error ends the job."""
        self.check_open()
        with self.ending_the_job_on_failure(), self._rank.generator.borrowed():
            yield
            self._rank.loop.flush()

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Context of calls that every rank refuses alike: a refusal leaves the engine as it is, and
        any other error ends the job."""
        self.check_open()
        try:
            with self._rank.generator.borrowed():
                yield
        except (ConfigError, SaveError):
            raise
        except BaseException as error:
            self.end_the_job(error)

    @contextmanager
    def ending_the_job_on_failure(self) -> Iterator[None]:
        """Context in which every error ends the job."""
        try:
            yield
        except BaseException as error:
            self.end_the_job(error)

    def _tell_what_all_wait_for(self) -> None:
        """Print what `axrt inspect` would, when the patience ends."""
        inspection = self._rank.inspection
        if inspection.run is None:
            return
        with suppress(OSError, ConfigError):  # the job ends all the same
            answers = asked(inspection.run, False, _ANSWERS_S, inspection.answer_waiting)
            lines = table(answers, processes_of(inspection.run)) if answers else ()
            print(*lines, sep="\n", file=sys.stderr, flush=True)

    def end_the_job(self, error: BaseException) -> NoReturn:
        """Give back what is the user's, say what is known of the error, and end the job."""
        self.closed = True
        error = as_failure(error)
        if isinstance(error, PeerLostError) and not self._world.survives:
            self._tell_what_all_wait_for()
        self._rank.inspection.stop()
        if self._world.survives:
            self.lets_go()  # this process may go on with another engine
        if not isinstance(error, AxrtError):  # ours say where by themselves
            error.add_note(f"on rank {self._rank.number}, {self._world.where()}")
        try:
            self.gives_back()
        except Exception as second:  # such as the device's, which has failed already
            error.add_note(f"the user's modules were not given back: {second}")
        self._world.fail(error)
