"""Which faults are planted: of each folder as many as its share of all sites, by a seed.

A site's rank is a digest of the seed and of its key, and each folder gives the sites of the lowest
ranks. So a change of other code moves no site in or out, but for the few at a folder's quota.
"""

import fnmatch
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .site import Site
from .sites import sites_of

AT_LEAST = 10  # of each folder
RUNTIME = "axrt"  # the files that stand flat in axrt/, without those that follow
# They read a configuration, plan, or start: their faults are those of another measurement.
NOT_RUNTIME = (
    *("__*__", "autoschedule", "default_*", "exit_codes", "flops"),
    *("generation", "known_costs", "launch", "model_job", "mpi_library", "one_call", "plan_*"),
    *("pipelined_generation", "precompile", "preflight"),
    *("schedule", "step_*"),
)
FOLDERS = (
    "scheduler",
    "axrt/store",
    "axrt/workers",
    "axrt/transport",
    "axrt/checkpoint",
    "axrt/model",
    "axrt/data",
    RUNTIME,
)


def files_of(root: Path, folder: str) -> list[Path]:
    if folder != RUNTIME:
        return sorted((root / folder).rglob("*.py"))
    return sorted(
        path
        for path in (root / folder).glob("*.py")
        if not any(fnmatch.fnmatch(path.stem, name) for name in NOT_RUNTIME)
    )


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
