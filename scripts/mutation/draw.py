"""Which faults are planted: of each folder as many as its share of all sites, by a seed.

A site's rank is a digest of the seed and of its key, and each folder gives the sites of the lowest
ranks. So a change of other code moves no site in or out, but for the few at a folder's quota.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .site import Site
from .sites import sites_of

AT_LEAST = 10  # of each folder
FOLDERS = (
    "scheduler",
    "axrt/store",
    "axrt/workers",
    "axrt/transport",
    "axrt/checkpoint",
    "axrt/model",
    "axrt/data",
    "axrt/engine",
    "axrt/runtime",
    "axrt/device",
    "axrt/world",
)


def files_of(root: Path, folder: str) -> list[Path]:
    return sorted((root / folder).rglob("*.py"))


def all_sites(root: Path, folders: Iterable[str] = FOLDERS) -> dict[str, list[Site]]:
    """The sites of each folder."""
    return {
        folder: [
            site
            for path in files_of(root, folder)
            for site in sites_of(str(path.relative_to(root)), path.read_text())
        ]
        for folder in folders
    }


def drawn(sites: Mapping[str, Sequence[Site]], sample: int, seed: int) -> dict[str, list[Site]]:
    """So many sites, in the order of their ranks."""
    wanted = quotas({folder: len(of) for folder, of in sites.items()}, sample)
    return {
        folder: sorted(of, key=lambda site: _rank(site, seed))[: wanted[folder]]
        for folder, of in sites.items()
    }


def _rank(site: Site, seed: int) -> str:
    return hashlib.sha256(f"{seed} {site.key}".encode()).hexdigest()


def quotas(sizes: Mapping[str, int], sample: int) -> dict[str, int]:
    """Each folder's share of the sample, by its size: at least `AT_LEAST`, at most what it has, and
    the largest remainders get what is left."""
    least = {folder: min(AT_LEAST, size, sample // len(sizes)) for folder, size in sizes.items()}
    rest = max(0, sample - sum(least.values()))
    total = sum(sizes.values()) or 1
    shares = {folder: rest * size / total for folder, size in sizes.items()}
    wanted = {folder: least[folder] + int(share) for folder, share in shares.items()}
    by_remainder = sorted(sizes, key=lambda folder: (int(shares[folder]) - shares[folder], folder))
    for folder in by_remainder[: sample - sum(wanted.values())]:
        wanted[folder] += 1
    return {folder: min(wanted[folder], sizes[folder]) for folder in sizes}
