"""`deepspeed.utils`."""

from collections.abc import Iterable, Iterator
from typing import Any


class RepeatingLoader:
    """Begins a loader anew when it ends.

    Args:
        loader: loader, such as a DataLoader.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
