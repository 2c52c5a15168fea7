"""axrt with the settings of a row."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI
from torch import Tensor

import axrt
from axrt.cli.sample import sample_of
from axrt.config import Config
from axrt.device.queues import NOW, Moment
from axrt.ledger.ledger import Ledger, Purpose, Tier
from axrt.ledger.prediction import Predictor
from axrt.transport import Parcel
from axrt.transport.mpi import MpiTransport
from axrt.transport.payload import flatten

from .contestant import Contestant, Counter
from .model import Sizes, adamw, batches_of, config_of, model_of
from .reach import tensors_in

# Nobody else's are counted, either: see `storages.py`.
_OTHERS = (Purpose.FROZEN, Purpose.ORIGINALS, Purpose.STASH, Purpose.MESSAGES)
_STATE = tuple([purpose for purpose in Purpose if purpose not in _OTHERS])
_IN_PROCESS = (Tier.DEVICE, Tier.HOST)  # without an accelerator both are the process's own memory


class _Sent:
    """The bytes that have been sent since it was made."""

    def __init__(self, transport: "_CountingTransport") -> None:
        self._transport, self._before = transport, transport.num_bytes

    @property
    def num_bytes(self) -> float:
        return self._transport.num_bytes - self._before


class _CountingTransport(MpiTransport):
    """Counts the bytes of all tensors that it is given to send."""

    num_bytes = 0

    def send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
        self.num_bytes += sum(tensor.nbytes for tensor in flatten(parcel.payload)[1])
        super().send(rank, parcel, after)

    @contextmanager
    def counting(self) -> Iterator[Counter]:
        yield _Sent(self)


def settings_of(sizes: Sizes, overrides: list[str], pipe: int, ranks: int) -> Config:
    """The configuration of a row.

    Args:
        sizes: of the run.
        overrides: of the row.
        pipe: ranks of a pipeline.
        ranks: of the job.
    """
    replicas = ranks // pipe
    layout = [
        f"parallel.pipe={pipe}",
        f"parallel.data={replicas}",
        f"schedule.microbatches={sizes.microbatches // replicas}",
    ]
    return config_of(sizes, [*layout, *overrides])


def contestant(sizes: Sizes, config: Config) -> Contestant:
    """axrt, ready to train."""
    transport = _CountingTransport(MPI.COMM_WORLD)
    engine = axrt.initialize(model_of(sizes), _of_named, config=config, transport=transport)
    batches = batches_of(sizes, engine.data_rank, engine.data_size)
    model = engine._model

    def step() -> float | None:
        loss = engine.train_batch(batches).loss
        return loss if engine.is_main else None

    def held() -> Iterator[Tensor]:
        layers = [list(layer.parameters()) for _, layer in model.layers()]
        roots = [layers, model.all_buckets, model.slots, model.scratch]
        return tensors_in(roots, "axrt.store", "axrt.offload", "torch.optim")

    return Contestant(step, held, transport.counting, engine.close)


def predicted(sizes: Sizes, config: Config, ranks: int) -> dict[str, int]:
    """What the ledger says of the fullest rank: bytes of weights, gradients and optimizer state,
    and with activations and messages."""
    predictor = Predictor(model_of(sizes), _of_named, sample_of(config))
    found = predictor.predict(config, ranks)
    ledgers = [found.of_rank(rank) for rank in range(ranks)]
    return {
        "predicted_bytes": max(map(_state_bytes, ledgers)),
        "predicted_all_bytes": max(sum(map(of.total, _IN_PROCESS)) for of in ledgers),
    }


def _state_bytes(ledger: Ledger) -> int:
    return sum(ledger.of_purpose(purpose, tier) for purpose in _STATE for tier in _IN_PROCESS)


def _of_named(named: Any) -> Any:
    return adamw([parameter for _, parameter in named])
