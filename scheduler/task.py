"""A task is *what* a rank does: a kind of work, a stage, a microbatch."""

# It prints the same everywhere (logs, traces, tests, errors): ``F2.7`` is the forward of stage 2
# for microbatch 7, and ``Task.parse`` reads it back. Microbatches are numbered on over the steps of
# a run: microbatch k of step t is n = t * m + k, so that a task has one name in a whole run. Work
# that is done once a step counts steps instead. Reductions and residencies count on over the steps
# as microbatches do. Some tasks are done part by part. ``step2.5`` is the optimizer step of the
# first bucket of stage 2 at the end of step 5, and ``step2.5/1`` that of the next bucket. ``W2.7``
# is the first piece of a weight gradient, and ``W2.7/1`` the next piece.

import re
from enum import Enum
from typing import NamedTuple, Self

_NOTATION = re.compile(r"([A-Za-z]+)(\d+)\.(\d+)(?:/(\d+))?")


class Counts(Enum):
    """The unit in which the numbers of a kind of work, or of messages, count."""

    MICROBATCHES = "microbatches"
    # of the forwards, or of the backwards, of a stage that a team holds, as `Job.joints` says
    JOINTS = "joints"
    BACK_JOINTS = "joints of backwards"
    STEPS = "steps"
    REDUCTIONS = "reductions"  # of a bucket's gradient over its copies, `Job.reductions` a step
    # of a stage's whole weights, as `Job.residencies` says; one a step by default
    RESIDENCIES = "residencies"


class Part(Enum):
    """The meaning of the last number of a task."""

    NONE = "nothing"
    BUCKET = "the bucket of the stage"
    PIECE = "the piece of the work; other work may run between two pieces"
    KNOWN_PIECE = "the same, where the number of pieces is known before the first one runs"


class Place(Enum):
    """Where a kind of work runs."""

    DEVICE = "in the device's queue of tasks"
    BESIDE = "beside the device's tasks, at the same time"


class Vocabulary(Enum):
    """Base of enums whose members carry facts as columns; the first column is how a member
    prints."""

    # Members are singletons, and Enum's own hash, written in Python, is a third of the cost of a
    # pick.
    __hash__ = object.__hash__

    def __new__(cls, notation: str, *columns: object) -> Self:
        word = object.__new__(cls)
        word._value_ = notation
        return word


class AnyKind(Vocabulary):
    """A vocabulary of kinds of work.

    Args:
        notation: how the kind prints.
        label: name of the kind in words, for texts.
        counts: what `Task.microbatch` counts: microbatches, steps, reductions or residencies.
        part: what `Task.part` says: nothing, a bucket or a piece.
        place: where the work runs, see `Place`.
    """

    def __init__(
        self,
        notation: str,
        label: str,
        counts: Counts,
        part: Part = Part.NONE,
        place: Place = Place.DEVICE,
    ) -> None:
        self.label = label
        self.counts = counts
        self.part = part
        self.beside = place is Place.BESIDE
        self.of_a_microbatch = counts is Counts.MICROBATCHES
        self.of_a_bucket = part is Part.BUCKET
        self.in_pieces = part is Part.PIECE
        self.may_be_piece = self.in_pieces or part is Part.KNOWN_PIECE


class Kind(AnyKind):
    """The kinds of work. `rules` say what each kind needs and what follows from it."""

    FORWARD = "F", "forward", Counts.MICROBATCHES, Part.KNOWN_PIECE
    RECOMPUTE = "R", "recomputed forward", Counts.MICROBATCHES  # where only its input was kept
    BACKWARD = "B", "backward", Counts.MICROBATCHES, Part.PIECE  # whole; or in two:
    # the stage before waits for it
    INPUT = "I", "input gradient", Counts.MICROBATCHES, Part.KNOWN_PIECE
    WEIGHT = "W", "weight gradient", Counts.MICROBATCHES, Part.PIECE  # nobody waits for it
    REDUCE = "reduce", "sum of a shard", Counts.REDUCTIONS, Part.BUCKET  # of all copies
    # Where copies add up in groups first:
    ACROSS = "across", "sum of a shard over groups", Counts.STEPS, Part.BUCKET
    JOIN = "join", "total of a shard put together", Counts.STEPS, Part.BUCKET
    ANNOUNCE = "announce", "ticket of a bucket", Counts.STEPS, Part.BUCKET, Place.BESIDE  # to all
    COLLECT = "collect", "sum by the library", Counts.STEPS, Part.BUCKET, Place.BESIDE
    # Where an optimizer makes changes of gradients before the vote:
    PRECONDITION = "precond", "changes of a bucket's matrices", Counts.STEPS, Part.BUCKET
    NORM = "norm", "norms of a stage's gradients", Counts.STEPS
    VOTE = "vote", "norm of all gradients", Counts.STEPS  # from those of the stages
    FETCH = "fetch", "state brought in", Counts.STEPS, Part.BUCKET, Place.BESIDE  # from scratch
    STEP = "step", "optimizer step", Counts.STEPS, Part.BUCKET
    REFRESH = "refresh", "what an optimizer computes anew", Counts.STEPS, Part.BUCKET
    STORE = "store", "state taken out", Counts.STEPS, Part.BUCKET, Place.BESIDE  # to scratch
    # Where steps are on the host:
    SCALE = "scale", "gradient of the whole batch", Counts.STEPS, Part.BUCKET
    UNLOAD = "unload", "gradient taken out", Counts.STEPS, Part.BUCKET, Place.BESIDE
    HOST_STEP = "hoststep", "optimizer step on the host", Counts.STEPS, Part.BUCKET, Place.BESIDE
    LOAD = "load", "weights taken to the device", Counts.STEPS, Part.BUCKET, Place.BESIDE
    GATHER = "gather", "weights of all shards", Counts.RESIDENCIES, Part.BUCKET
    # Where weights are whole for a residency alone:
    # from scratch:
    BRING = "bring", "weights brought in", Counts.RESIDENCIES, Part.NONE, Place.BESIDE
    SHARE = "share", "weights of the own shard sent", Counts.RESIDENCIES
    RELEASE = "release", "whole weights let go", Counts.RESIDENCIES
    # Where stashes leave the device:
    OFFLOAD = "offload", "stash taken out", Counts.MICROBATCHES, Part.NONE, Place.BESIDE
    RELOAD = "reload", "stash brought back", Counts.MICROBATCHES, Part.NONE, Place.BESIDE


FORMER_KINDS = ("refetch", "commit", "restore")


class Task(NamedTuple):
    """One piece of work on one stage.

    Args:
        kind: kind of the work.
        stage: stage index over the whole model, from 0; stage 0 holds the first layers.
        microbatch: running number over all steps, from 0, of what `kind.counts` says: a microbatch,
            a step, a reduction or a residency.
        part: index of the bucket on the stage, for work on a bucket; index of the piece, for a
            forward, a whole backward or a weight gradient in pieces; else 0.
    """

    kind: AnyKind
    stage: int
    microbatch: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}" + (
            f"/{self.part}" if self.part else ""
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the short notation back.

        Raises:
            ValueError: the text is no task; the message quotes it.
        """
        match = _NOTATION.fullmatch(text)
        kinds = {kind.value: kind for kind in Kind}
        if match and match[1] in FORMER_KINDS:
            raise ValueError(
                f"{text!r} is of a former version, which tried steps before the norm of all "
                "gradients was known; expected the timeline of a run of this version"
            )
        if match is None or match[1] not in kinds:
            raise ValueError(
                f"{text!r} is not a task; expected one of {sorted(kinds)} with STAGE.MICROBATCH, "
                "as in 'F2.7'"
            )
        return cls(kinds[match[1]], int(match[2]), int(match[3]), int(match[4] or 0))
