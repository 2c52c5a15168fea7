"""What keeps the metrics of runs elsewhere: TensorBoard and Weights & Biases, by the names that
torchtitan gives them."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.scheduler.regular_file import read_text

FOLDER, WANDB_ID = "tensorboard", "wandb-id"
# Names of torchtitan's, and factors, by ours.
_THEIRS: dict[str, tuple[str, float]] = {
    "loss": ("loss_metrics/global_avg_loss", 1.0),
    "val_loss": ("validation_metrics/loss", 1.0),
    "lr": ("lr", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "tokens_per_s_device": ("throughput(tps)", 1.0),
    "tflops": ("tflops", 1.0),
    "mfu": ("mfu(%)", 100.0),
    "step_s": ("time_metrics/end_to_end(s)", 1.0),
    "device_bytes": ("memory/max_active(GiB)", 2.0**-30),
}


class Tracker(Protocol):
    """Keeps the metrics of one run."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Keep values, by torchtitan's names."""
        ...

    def close(self) -> None: ...


def theirs(values: Mapping[str, Any]) -> dict[str, float]:
    """The values of a line of metrics that torchtitan has names for, by these."""
    values = {**values, "device_bytes": (values.get("memory_bytes") or {}).get("device")}
    return {
        name: float(values[ours]) * factor
        for ours, (name, factor) in _THEIRS.items()
        if values.get(ours) is not None
    }


def check_trackers(config: Config) -> None:
    """Check that the trackers that a run asks for are installed.

    Raises:
        ConfigError: one is not.
    """
    for key, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config.run, key) and find_spec(package) is None:
            raise _missing(f"run.{key}", package)


def trackers_of(config: Config, directory: Path) -> list[Tracker]:
    """The trackers that a run asks for.

    Raises:
        ConfigError: one refuses.
    """
    found: list[Tracker] = []
    if config.run.tensorboard:
        found.append(_TensorBoard(directory / FOLDER))
    if config.run.wandb:
        found.append(_WeightsAndBiases(config, directory))
    return found


class _TensorBoard:
    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), flush_secs=10)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, config: Config, directory: Path) -> None:
        import wandb

        # a run that goes on is the same one there, too
        kept = directory / WANDB_ID
        try:
            self._run: Any = wandb.init(
                project=config.run.wandb,
                name=directory.name,
                dir=str(directory),
                config=config.as_dict(),
                id=read_text(kept).strip() if kept.exists() else None,
                resume="allow",
            )
            kept.write_text(f"{self._run.id}\n", encoding="utf-8")
        except wandb.Error as error:
            raise ConfigError(
                f"run.wandb = {config.run.wandb!r}: {error}; set WANDB_MODE=offline to keep all on "
                f"the disk, or remove {kept}, where it exists, to begin another run there"
            ) from None
        except OSError as error:
            raise ConfigError(f"{kept}: {error.strerror}; expected a file of the run") from None

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _missing(key: str, package: str) -> ConfigError:
    return ConfigError(f"{key}: {package} is not installed; expected it: pip install 'axrt[track]'")
