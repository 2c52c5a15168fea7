"""One call of an engine at a time: a second call, from another thread or within the first, would
run tasks of both on one state."""

# A lock that waits would hide the mistake: the second call would come later, with other ranks in
# another order. So it is refused, the first one goes on, and the text says which thread was where.
# Calls are numbered, and ranks tell their number with what they exchange (`exchange.py`).

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from axrt.errors import AxrtError

P = ParamSpec("P")
T = TypeVar("T")


class Call(NamedTuple):
    """A call of an engine."""

    number: int  # how many there were before
    name: str  # name of the method

    def __str__(self) -> str:
        return f"{self.name} (call {self.number} of its engine)"


class OneCall:
    """The call that is under way, and its thread.

    Attributes:
        last: the call that every rank makes which is under way, or was last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last = Call(0, "initialize")
        self._call, self._thread = "", threading.current_thread()

    @contextmanager
    def of(self, call: str) -> Iterator[None]:
        """Context within which the call is under way.

        Raises:
            AxrtError: another call is under way; that one goes on, and nothing has changed.
        """
        if not self._lock.acquire(blocking=False):
            raise AxrtError(self._refusal(call))
        self._call, self._thread = call, threading.current_thread()
        try:
            yield
        finally:
            self._lock.release()

    def _refusal(self, call: str) -> str:
        me, other = threading.current_thread(), self._thread
        if me is other:
            return (
                f"thread {me.name!r} calls {call} within {self._call}; expected it after "
                f"{self._call} has returned: the iterator of "
                "batches, layers and hooks must not call the engine"
            )
        return (
            f"thread {me.name!r} calls {call} while thread {other.name!r} is in {self._call}; "
            "expected one call of an engine at a time. "
            "Make all calls from one thread, or one after the other under a lock"
        )


class _Calls(Protocol):
    _calls: OneCall


E = TypeVar("E", bound=_Calls)


def one_at_a_time(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """Decorate a method so that it raises `AxrtError` while another one of the same object is under
    way."""

    @wraps(method)
    def call(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calls.of(method.__name__):
            self._calls.last = Call(self._calls.last.number + 1, method.__name__)
            return method(self, *args, **kwargs)

    return call
