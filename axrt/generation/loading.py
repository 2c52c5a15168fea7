"""The layers of a trained model, taken from a checkpoint without an engine."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from axrt.checkpoint.extra_state import give_back, states_in
from axrt.checkpoint.folder import newest_undamaged
from axrt.checkpoint.in_memory import to_stderr
from axrt.checkpoint.layers import check_weights, take_weights, weights_of
from axrt.checkpoint.manifest import Manifest
from axrt.checkpoint.slices import SliceReader
from axrt.config import Config
from axrt.errors import ConfigError
from axrt.model.layers import build
from axrt.model.module import PipelineModule
from axrt.models.registry import model_of
from axrt.observe.metrics import kept_in_run
from axrt.scheduler.plural import plural


def load(run: str | os.PathLike[str], factory: str = "") -> nn.Sequential:
    """The model of a run, as a plain module of torch for one process.

    Args:
        run: directory of a run, a folder of checkpoints, or one of these. The newest checkpoint
            that is not damaged is taken.
        factory: 'package.module:function', the `model.factory` of the run. It is needed where the
            run is not this user's own, so that no code runs because a file of somebody else's says
            so; "": the run is trusted, or has none.
    Returns:
        The layers in order, on the CPU, in float32 and in evaluation mode; tied layers share their
        weight. Called with a microbatch of inputs it gives what the last layer returns.
    Raises:
        ConfigError: there is no checkpoint, or the model cannot be made.
        DamagedError: all checkpoints are damaged.
    """

    def taken(checkpoint: Path) -> nn.Sequential:
        manifest, config, model = described(checkpoint, factory)
        whole = model.sequential(config.run.seed)
        _take(checkpoint, manifest, dict(enumerate(whole)))
        return whole.eval()

    return newest_undamaged(Path(run), taken, to_stderr)


def layers_of_rank(
    checkpoint: Path, rank: int, ranks: int, factory: str = ""
) -> tuple[Config, nn.Sequential]:
    """The layers that a rank has of the model of a checkpoint, with its configuration.

    Args:
        checkpoint: directory of the checkpoint.
        rank, ranks: which rank, of how many that hold consecutive layers.
        factory: as for `load`.
    Raises:
        ConfigError: the model has fewer layers than there are ranks, or is made by code that
            nobody has asked for.
        DamagedError: it is damaged.
    """
    manifest, config, model = described(checkpoint, factory)
    if ranks > len(model.layers):
        raise ConfigError(
            f"{plural(ranks, 'rank')} for the {len(model.layers)} layers of {checkpoint}; expected "
            f"a layer for each rank. Start at most {plural(len(model.layers), 'rank')}"
        )
    cuts = model.boundaries(ranks)
    made = partial(build, model.layers, seed=config.run.seed)
    mine = {place: made(place) for place in range(cuts[rank], cuts[rank + 1])}
    _take(checkpoint, manifest, mine)
    return config, nn.Sequential(*mine.values()).eval()


def described(checkpoint: Path, factory: str) -> tuple[Manifest, Config, PipelineModule]:
    """What a checkpoint is of: its manifest, the configuration there, and the model.

    Raises:
        ConfigError: the model is made by code that nobody has asked for, or cannot be made.
        DamagedError: the manifest is damaged.
    """
    manifest = Manifest.read(checkpoint)
    config = Config.read(manifest.config)
    _check_factory(checkpoint, config, factory)
    return manifest, config, model_of(config)


def _take(checkpoint: Path, manifest: Manifest, layers: Mapping[int, nn.Module]) -> None:
    tensors = {place: dict(weights_of(place, layer)) for place, layer in layers.items()}
    checked = check_weights(checkpoint, manifest, tensors, SliceReader())
    extra = states_in(checked)
    take_weights(checked, tensors)
    give_back(layers.items(), extra)


def _check_factory(checkpoint: Path, config: Config, named: str) -> None:
    """Check that no code runs because a file of somebody else's says so.

    Args:
        checkpoint: the checkpoint.
        config: configuration in its manifest.
        named: `model.factory` as the caller names it; "": it names none.
    Raises:
        ConfigError: the model is made by code that the caller does not name, and the run is not
            this user's own.
    """
    factory = config.model.factory
    if not factory or factory == named:
        return
    own = kept_in_run(checkpoint, "config.toml")
    is_mine = own is not None and own.stat().st_uid == os.geteuid()
    if own and is_mine and Config.of_run(own.parent).model.factory == factory:
        return
    raise ConfigError(
        f"{checkpoint} says model.factory = {factory!r}, whose code would be imported from "
        f"{os.getcwd()}, and there is no config.toml of yours that says so; expected "
        f"--model-factory {factory}, or factory = {factory!r} in Python, if you trust it"
    )
