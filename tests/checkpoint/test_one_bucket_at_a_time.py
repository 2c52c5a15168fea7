"""Checkpoints are saved and loaded with the optimizer's state of one bucket in memory."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import axrt
from axrt.checkpoint.layers import take_layers
from axrt.checkpoint.tensor_file import CheckedFile
from axrt.store.bucket import Bucket
from axrt.store.routes import OnDevice
from axrt.transport.local import LocalWorld

from ..engine.models import motley, perceptron
from ..engine.reference import adamw, configured, random_batches
from ..engine.test_ties import batches as token_batches
from ..engine.test_ties import tied

BATCHES = random_batches((6, 16), classes=5, microbatches=4)


def engine_with(model: Any, bucket_mb: float, weights: str = "bfloat16") -> axrt.Engine:
    config = configured(4, memory={"bucket_mb": bucket_mb}, precision={"weights": weights})
    return axrt.initialize(model(), adamw, config=config, transport=LocalWorld(1).alone())


def offloaded(bucket: Bucket) -> list[Tensor]:
    """The masters and the optimizer's state of a bucket."""
    pairs = zip(bucket.trained, bucket.named, strict=True)
    masters = [master.data for (_, master), (_, parameter) in pairs if master is not parameter]
    return masters + [
        value.data for _, state in bucket.state.saved() for value in state.tensors.values()
    ]


class Hollow:
    """A stand-in for memory elsewhere: values of a bucket are nan unless it is present, and no two
    buckets are."""

    def __init__(self, engine: axrt.Engine) -> None:
        self.buckets = engine._model.all_buckets
        self.away: dict[Bucket, list[Tensor]] = {}
        self.entered: list[Bucket] = []
        for bucket in self.buckets:
            self.take_away(bucket)

    def take_away(self, bucket: Bucket) -> None:
        self.away[bucket] = [value.clone() for value in offloaded(bucket)]
        for value in offloaded(bucket):
            value.fill_(float("nan"))

    def bring(self, bucket: Bucket) -> None:
        for value, kept in zip(offloaded(bucket), self.away.pop(bucket), strict=True):
            value.copy_(kept)

    @contextmanager
    def present(self, bucket: Bucket) -> Iterator[None]:
        if bucket not in self.away:  # as where a bucket is present already
            yield
            return
        assert len(self.away) == len(self.buckets), "another bucket is present"
        self.entered.append(bucket)
        self.bring(bucket)
        try:
            yield
        finally:
            self.take_away(bucket)

    def bring_all(self) -> None:
        for bucket in self.buckets:
            self.bring(bucket)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
@pytest.mark.parametrize("bucket_mb", [0.0005, 0.004, 25.0])
@pytest.mark.parametrize(
    ("model", "batches"), [(perceptron, BATCHES), (tied, token_batches())], ids=["plain", "tied"]
)
def test_values_are_read_and_written_only_while_their_bucket_is_present(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    batches: Any,
    bucket_mb: float,
    weights: str,
) -> None:
    with engine_with(model, bucket_mb, weights) as engine:
        engine.train_batch(iter(batches(0)[:4]))
        engine.save_checkpoint(tmp_path / "plain")
        engine.train_batch(iter(batches(1)[:4]))  # something to forget
        hollow = Hollow(engine)
        of = {bucket.route: bucket for bucket in hollow.buckets}
        present = lambda route, changes=False: hollow.present(of[route])  # noqa: E731
        monkeypatch.setattr(OnDevice, "present", present)
        engine.load_checkpoint(tmp_path / "plain")
        assert hollow.entered == hollow.buckets
        hollow.entered.clear()
        engine.save_checkpoint(tmp_path / "hollow")
        assert len(hollow.entered) == 1 or len(hollow.buckets) > 1
        hollow.bring_all()
        monkeypatch.undo()
        engine.save_checkpoint(tmp_path / "again")
    plain = files_in(tmp_path / "plain")
    assert files_in(tmp_path / "hollow") == plain
    assert files_in(tmp_path / "again") == plain


class Gauge:
    """Bytes of tensors that were read from files and are still in memory, as they were read."""

    def __init__(self) -> None:
        self._read, self.most = CheckedFile.tensor, 0
        self._known: list[tuple[weakref.ref[Tensor], int]] = []

    def tensor(self, file: CheckedFile, name: str) -> Tensor:
        value = self._read(file, name)
        self._known.append((weakref.ref(value), value.data_ptr()))
        alive = [(ref(), at) for ref, at in self._known]
        held = [value for value, at in alive if value is not None and value.data_ptr() == at]
        self.most = max(self.most, sum(one.nbytes for one in held))
        return value


def test_nothing_is_kept_of_a_check_and_all_is_read_to_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_with(perceptron, 0.002) as engine:
        engine.train_batch(iter(BATCHES(0)))
        engine.save_checkpoint(tmp_path / "a")
        gauge = Gauge()
        monkeypatch.setattr(CheckedFile, "tensor", lambda file, name: gauge.tensor(file, name))
        in_check: list[int] = []

        def then_take(*given: Any) -> None:
            in_check.append(gauge.most)
            take_layers(*given)

        monkeypatch.setattr("axrt.checkpoint.loading.take_layers", then_take)
        engine.load_checkpoint(tmp_path / "a")
        assert in_check == [0]
        assert gauge.most == 0


def test_a_file_that_changes_between_check_and_use_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(motley, 25.0)
    engine.save_checkpoint(tmp_path / "a")
    file = max((tmp_path / "a").glob("layer-*.safetensors"), key=lambda path: path.stat().st_size)

    def after_a_change(*given: Any) -> None:
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        take_layers(*given)

    monkeypatch.setattr("axrt.checkpoint.loading.take_layers", after_a_change)
    with pytest.raises(axrt.AxrtError, match=f"{file.name} has changed since it was checked"):
        engine.load_checkpoint(tmp_path / "a")
    with pytest.raises(axrt.AxrtError, match="this engine is closed, or has failed"):
        engine.save_checkpoint(tmp_path / "b")
