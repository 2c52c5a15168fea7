"""DeepSpeed's monitors: the loss and the learning rate of each step, by the number of samples, for
TensorBoard, Weights & Biases, and files of CSV."""

import atexit
import csv
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from axrt.errors import ConfigError

# The keys of each section.
SECTIONS = {
    "tensorboard": ("enabled", "output_path", "job_name"),
    "wandb": ("enabled", "project", "group", "team"),
    "csv_monitor": ("enabled", "output_path", "job_name"),
}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
_JOB = "DeepSpeedJobName"  # DeepSpeed's default


class Monitor(Protocol):
    """Keeps values by the number of samples."""

    def record(self, samples: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Monitors:
    """Those that a configuration asks for; made on the main rank alone.

    Args:
        sections: sections of the JSON configuration, by name, of monitors that are on.
    Raises:
        ConfigError: a library is not installed, or a place cannot be written to.
    """

    def __init__(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        kinds: dict[str, Callable[[Mapping[str, Any]], Monitor]]
        kinds = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases, "csv_monitor": _Csv}
        self._open, self._told = ExitStack(), False
        atexit.register(self.close)  # scripts may end without `destroy`
        self._monitors: list[Monitor] = []
        for name, section in sections.items():
            package = _PACKAGES.get(name)
            if package and find_spec(package) is None:
                raise ConfigError(
                    f"{name}: {package} is not installed; expected it: pip install 'axrt[track]'"
                )
            try:
                monitor = kinds[name](section)
            except (OSError, ValueError) as error:  # of a name with a NUL, too
                raise ConfigError(
                    f"{name}.output_path: {error}; expected a place to write to"
                ) from None
            self._open.callback(monitor.close)
            self._monitors.append(monitor)

    def record(self, samples: int, loss: float, lr: float) -> None:
        """Keep what a step has come to, by DeepSpeed's names.

        Args:
            samples: number of samples that all steps so far have used up.
            loss, lr: loss and learning rate of the step.
        """
        values = {"Train/Samples/train_loss": loss, "Train/Samples/lr": lr}
        for monitor in self._monitors:
            try:
                monitor.record(samples, values)
            except OSError as error:  # of a full disk, say: training goes on
                if not self._told:
                    print(f"axrt: a monitor cannot write: {error}", file=sys.stderr)
                self._told = True

    def close(self) -> None:
        """Have all monitors write what they hold."""
        self._open.close()


def _folder(section: Mapping[str, Any]) -> Path:
    return Path(section.get("output_path") or "runs") / str(section.get("job_name") or _JOB)


class _TensorBoard:
    def __init__(self, section: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(_folder(section)))

    def record(self, samples: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, section: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run: Any = wandb.init(
                project=section.get("project") or "deepspeed",
                group=section.get("group"),
                entity=section.get("team"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb: {error}; set WANDB_MODE=offline to keep all on the disk"
            ) from None

    def record(self, samples: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=samples)

    def close(self) -> None:
        self._run.finish()


class _Csv:
    """A file for each name, such as Train_Samples_lr.csv, with a line a step."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._folder = _folder(section)
        self._folder.mkdir(parents=True, exist_ok=True)

    def record(self, samples: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            path = self._folder / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(("step", name.rpartition("/")[2]))
                rows.writerow((samples, value))

    def close(self) -> None: ...
