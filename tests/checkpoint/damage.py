"""Ways to damage files of a checkpoint, each from a seed; whatever they do must be found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from axrt.checkpoint.durable import digest_of
from axrt.checkpoint.manifest import MANIFEST


def flip_a_bit(file: Path, random: Random) -> str:
    data = bytearray(file.read_bytes())
    bit = random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return f"bit {bit} of {file.name} flipped"


def cut_off(file: Path, random: Random) -> str:
    data = file.read_bytes()
    length = random.randrange(len(data))
    file.write_bytes(data[:length])
    return f"{file.name} cut to {length} of {len(data)} bytes"


def lengthen(file: Path, random: Random) -> str:
    with file.open("ab") as more:
        more.write(random.randbytes(random.randrange(1, 100)))
    return f"{file.name} has bytes behind its end"


def zero_a_block(file: Path, random: Random) -> str:
    """What a disk gives that has lost a sector."""
    data = bytearray(file.read_bytes())
    at = random.randrange(len(data))
    block = bytes(min(512, len(data) - at))
    if data[at : at + len(block)] == block:
        return flip_a_bit(file, random)
    data[at : at + len(block)] = block
    file.write_bytes(data)
    return f"{file.name} has {len(block)} zeros at {at}"


def remove(file: Path, random: Random) -> str:
    file.unlink()
    return f"{file.name} removed"


def replace_by_a_directory(file: Path, random: Random) -> str:
    file.unlink()
    file.mkdir()
    return f"{file.name} is a directory"


def lead_nowhere(file: Path, random: Random) -> str:
    file.unlink()
    file.symlink_to("nowhere")
    return f"{file.name} leads nowhere"


def exchange(file: Path, random: Random) -> str:
    """With another file of the same checkpoint that differs."""
    others = [
        other
        for other in sorted(file.parent.iterdir())
        if other.name != file.name and other.read_bytes() != file.read_bytes()
    ]
    other = random.choice(others)
    mine, its = file.read_bytes(), other.read_bytes()
    file.write_bytes(its)
    other.write_bytes(mine)
    return f"{file.name} and {other.name} exchanged"


def take_from_an_older_step(file: Path, random: Random) -> str:
    older = min(
        path
        for path in file.parent.parent.iterdir()
        if path.is_dir() and path != file.parent and (path / file.name).exists()
    )
    shutil.copy(older / file.name, file)
    return f"{file.name} is that of {older.name}"


Damage = Callable[[Path, Random], str]
ON_BYTES: tuple[Damage, ...] = (flip_a_bit, cut_off, lengthen, zero_a_block)
ON_FILES: tuple[Damage, ...] = (
    *ON_BYTES,
    remove,
    replace_by_a_directory,
    lead_nowhere,
    exchange,
    take_from_an_older_step,
)


def rewrite_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Say something else in a manifest, with a digest that fits: what only a program of somebody's
    does."""
    path = checkpoint / MANIFEST
    said = json.loads(path.read_text())
    change(said)
    said.pop("crc32")
    head, rest = b'{"crc32": "', b'",\n' + json.dumps(said).encode().removeprefix(b"{")
    path.write_bytes(head + digest_of(head + b"0" * 8 + rest).encode() + rest)


def put(file: Path, data: bytes) -> None:
    """Other bytes in a file, with a digest in the manifest that fits."""
    file.write_bytes(data)
    record = {"size_bytes": len(data), "crc32": digest_of(data)}
    rewrite_manifest(file.parent, lambda said: said["files"].__setitem__(file.name, record))
