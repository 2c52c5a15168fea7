"""The errors that axrt raises, by whose mistake they are."""

import re

_OVERLONG = re.compile(r"(\S{900})\S{100,}")  # a value that a damaged file has, or a whole file


class AxrtError(Exception):
    """Base of all errors that axrt raises on purpose.

    The text says what was found, where, what was expected and what to do. Of a word of 1,000
    characters or more it has the first 900.
    """

    def __str__(self) -> str:
        return _OVERLONG.sub(r"\1...", super().__str__())


class ConfigError(AxrtError, ValueError):
    """A setting that cannot work. Every rank finds the same one, before anything is written or
    sent."""


class DamagedError(ConfigError):
    """A checkpoint whose files differ from those that were saved; the text names the file and the
    damage."""


class SaveError(AxrtError):
    """A checkpoint, or another file of a run, that could not be written, as on a full disk.

    Files that were saved before stand.
    """


class ScratchError(AxrtError):
    """A disk that has lost or changed offloaded state, or could not take it. Training ends: it may
    go on from a checkpoint."""


class DataError(AxrtError):
    """Data that is missing, empty or does not fit; seen by the rank that reads."""


class EmptyEvaluationError(DataError):
    """An evaluation without any microbatch, over all replicas; every rank finds it, and the engine
    goes on."""


class ModelError(AxrtError):
    """A model or a loss that cannot be trained; seen by the rank that runs it, at the first
    step."""


class OutputTypeError(ModelError, TypeError):
    """What a layer or a loss has returned is of a type that cannot be sent on, or be a loss."""


class LaunchError(AxrtError):
    """Ranks that did not come up as the launcher meant them to."""


class NonFiniteLossError(AxrtError):
    """A loss that is infinite or not a number; the text names step, stage and microbatch."""


class PeerLeftError(AxrtError):
    """A rank has closed its engine, or is in another call, while this one still waits for it."""


class PeerLostError(AxrtError):
    """A rank of the job has died, or shows no sign of life; the text names it and the rank that
    waited for it.

    Attributes:
        silent: rank that does not answer, though MPI does not say that it has died; None: there is
            no such rank.
    """

    silent: int | None = None
