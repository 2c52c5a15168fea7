"""The manifest of a checkpoint: a JSON file that begins with its own digest and has those of all
other files."""

#   {"crc32": "8c736521", "format": 2, "step": 260, ..., "files": {"layer-0003.safetensors":
#   {"size_bytes": 66304, "crc32": "..."}}}
#
# The first digest is that of the file's own bytes with eight zeros in its place, so no bit of the
# file can change unseen.

import json
import math
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from axrt.config import Config
from axrt.config.former import with_present_names
from axrt.errors import ConfigError, DamagedError
from axrt.scheduler.regular_file import json_of, read_bytes
from axrt.store.loss_scale import MOST

from .durable import digest_of, write_durably

FORMAT = 2
MANIFEST = "manifest.json"
_HEAD, _ZEROS = b'{"crc32": "', b"0" * 8
_END = len(_HEAD) + len(_ZEROS)
_MOST = 2**63
_LARGEST_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and digest of a file when it was saved."""

    size_bytes: int  # size of the file, in bytes
    crc32: str  # digest of its bytes, 8 hexadecimal digits, see `durable.digest_of`


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_rate(value: object) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))  # type: ignore[arg-type]


def _is_record(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"size_bytes", "crc32"}
        and _is_count(value["size_bytes"])
        and isinstance(value["crc32"], str)
        and re.fullmatch("[0-9a-f]{8}", value["crc32"]) is not None
    )


def _mapping_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_loss_scale(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {"scale", "good"}
        and type(value["scale"]) in (int, float)
        and 2.0**-24 <= value["scale"] <= MOST
        and _is_count(value["good"])
    )


def _are_layers(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_text, value))


_EXPECTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "step": (_is_count, "a number of steps"),
    "samples": (_is_count, "a number of samples"),
    "seed": (_is_count, "a seed"),
    "lr": (_is_rate, "a finite number or null"),
    "saved_at": (_is_text, "a time"),
    "layers": (_are_layers, "names of layers"),
    "config": (_mapping_of(_is_mapping), "sections of keys"),
    "versions": (_mapping_of(_is_text), "names with versions"),
    "loss_scale": (_is_loss_scale, "a positive scale with a number of good steps, or null"),
    "extra": (_is_mapping, "keys with values"),
    "files": (_mapping_of(_is_record), "names with size_bytes and crc32"),
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint."""

    step: int  # number of steps that are done
    samples: int  # number of samples of the data that are used up, over all replicas
    seed: int  # run seed from which seeds of layers and of dropout are derived, 0 <= seed < 2**63
    # learning rate of the last step, None where it was no number; for people, since it follows
    # from the step
    lr: float | None
    saved_at: str  # time when it was saved, UTC, in ISO format; for people
    layers: list[str]  # class name of each layer, in order
    config: dict[str, dict[str, Any]]  # every section with every key, by today's names
    versions: dict[str, str]  # versions of Python, torch and axrt
    # `scale` of the next step's losses, and the number of `good` steps in a row; None where
    # losses are not scaled
    loss_scale: dict[str, Any] | None
    extra: dict[str, Any]  # the user's own values, as JSON can hold them
    # record of every other file, by name, as the dict of a `FileRecord`
    files: dict[str, dict[str, Any]]

    @classmethod
    def of(
        cls,
        step: int,
        samples: int,
        lr: float,
        layers: list[str],
        config: Config,
        extra: Mapping[str, Any],
        loss_scale: dict[str, Any] | None = None,
    ) -> Self:
        """The manifest of a run as it stands, without files; arguments are the fields of that name.

        Raises:
            ConfigError: `extra` is not JSON.
        """
        try:
            text = json.dumps({"extra": dict(extra)}, allow_nan=False)
            own = json_of(text)["extra"]  # as deep as it stands in the manifest
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"extra of a checkpoint: {error}; expected what JSON can hold"
            ) from None
        import torch  # whoever reads alone, a launcher for one, does without

        versions = {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "axrt": metadata.version("axrt"),
        }
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(
            step,
            samples,
            config.run.seed,
            lr if math.isfinite(lr) else None,
            now,
            layers,
            config.as_dict(),
            versions,
            loss_scale,
            own,
            {},
        )

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """The manifest of a whole checkpoint.

        Raises:
            DamagedError: there is none, its bytes have changed, or it holds a value that cannot be.
            ConfigError: it has a format that this version does not know.
        """
        path = checkpoint / MANIFEST
        try:
            data = read_bytes(path, _LARGEST_BYTES)
        except OSError as error:
            raise DamagedError(
                f"{path}: {error.strerror}; expected that of a whole checkpoint"
            ) from None
        found = _parsed(path, data)
        is_as_written = (
            data[: len(_HEAD)] == _HEAD
            and digest_of(_HEAD + _ZEROS + data[_END:]).encode() == data[len(_HEAD) : _END]
        )
        if not isinstance(found, dict) or (
            not is_as_written and ("crc32" in found or found.get("format") == FORMAT)
        ):
            raise DamagedError(
                f"{path} has other bytes than were saved: its crc32 does not fit; expected the "
                "manifest as it was written"
            )
        if found.get("format") != FORMAT:
            raise ConfigError(
                f"{path} is of another format; expected format {FORMAT}, which axrt of this "
                "version writes"
            )
        found.setdefault("loss_scale", None)  # of a former version, which scaled none
        for name, (fits, expected) in _EXPECTED.items():
            if name not in found:
                raise DamagedError(
                    f"{path} has no {name}; expected the manifest of a whole checkpoint"
                )
            if not fits(found[name]):
                raise DamagedError(f"{path}: {name} = {str(found[name])[:60]}; expected {expected}")
        found["config"] = with_present_names(found["config"])
        return cls(**{name: found[name] for name in _EXPECTED})

    def record_of(self, name: str) -> FileRecord | None:
        """The record of a file; None where the manifest has none."""
        said = self.files.get(name)
        return None if said is None else FileRecord(**said)

    def write(self, directory: Path) -> None:
        """Write the manifest durably to a directory.

        Raises:
            OSError: it cannot be written.
        """
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False).encode()
        rest = b'",\n' + body.removeprefix(b"{\n")
        write_durably(
            directory / MANIFEST, _HEAD + digest_of(_HEAD + _ZEROS + rest).encode() + rest
        )


def _parsed(path: Path, data: bytes) -> object:
    try:
        return json_of(data)
    except ValueError as error:
        raise DamagedError(
            f"{path} is not JSON: {str(error)[:80]}; expected the manifest of a whole checkpoint"
        ) from None
