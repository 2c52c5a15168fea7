"""Checks of common mistakes in using axrt, which are refused or warned of before they do harm."""

import difflib
import hashlib
import multiprocessing
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from axrt.errors import AxrtError, ConfigError
from axrt.model.layers import Layer, TiedLayerSpec
from axrt.model.loss import has_tensors
from axrt.model.module import PipelineModule
from axrt.store.flat import digest_of


def refuse_in_a_worker() -> None:
    """Refuse to run in a worker process that imports the script: it is no rank, and must not become
    one.

    Raises:
        ConfigError: this process is such a worker, of a DataLoader for example.
    """
    if getattr(
        multiprocessing.current_process(), "_inheriting", False
    ):  # what Python itself asks before it starts a process
        raise ConfigError(
            "initialize was called while a worker process, of a DataLoader say, imports this "
            "script, which it does from the beginning; "
            'put everything but definitions under `if __name__ == "__main__":`'
        )


def check_use(model: Any, optimizer: Any, lr_schedule: Any = None) -> None:
    """Check the types of what `initialize` takes.

    Raises:
        ConfigError: the model is no `PipelineModule`, the optimizer is not callable, or the
            learning rate is a module with state.
    """
    if isinstance(lr_schedule, nn.Module) and has_tensors(lr_schedule):
        raise ConfigError(
            f"lr_schedule is a {type(lr_schedule).__name__} with weights or buffers, which nothing "
            "trains and no checkpoint holds; expected a function of the step alone"
        )
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"model is of type {type(model).__name__}; expected an axrt.PipelineModule(layers, "
            "loss_fn)"
        )
    if optimizer is not None and not callable(optimizer):
        raise ConfigError(
            f"optimizer is of type {type(optimizer).__name__}; expected a function that makes one "
            "of a rank's own parameters, "
            f"such as lambda named: torch.optim.{type(optimizer).__name__}(named, lr=1e-3)"
        )


def digests_of_tied(layers: Sequence[Layer]) -> dict[str, str]:
    """A digest of the values of each module that a tied layer is given, by the layer's index."""
    found: dict[str, str] = {}
    for place, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec) and layer.given is not None:
            tensors = [*layer.given.parameters(), *layer.given.buffers()]
            values = repr([digest_of(tensor.detach().cpu()) for tensor in tensors])
            found[str(place)] = hashlib.sha256(values.encode()).hexdigest()[:12]
    return found


def check_tied(digests: Sequence[Mapping[str, str]]) -> None:
    """Check that ranks give tied layers the same values.

    Args:
        digests: what `digests_of_tied` has found on each rank.
    Raises:
        ConfigError: two differ.
    """
    for rank, found in enumerate(digests):
        for place in sorted(found.keys() | digests[0].keys()):
            if digests[0].get(place) != found.get(place):
                raise ConfigError(
                    f"layer {place}, a TiedLayerSpec of a module, has other values on rank {rank} "
                    "than on rank 0, or is given as a class on one of them; expected the same on "
                    "every rank. Seed torch before the module is made, or give its class"
                )


def check_optimizers(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Check that copies of a bucket are stepped by the same optimizer.

    Args:
        of_ranks: for each rank what tells the optimizer of each of its buckets, by the name of the
            bucket's first parameter.
    Raises:
        ConfigError: two ranks differ.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, mine in enumerate(of_ranks):
        for name, told in mine.items():
            other, its = first.setdefault(name, (rank, told))
            if its != told:
                raise ConfigError(
                    f"the optimizer of {name} is {its} on rank {other} and {told} on rank {rank}; "
                    "expected the same on every rank, so that replicas stay equal"
                )


def check_kept(keep: Collection[str], classes: Collection[str]) -> None:
    """Check that each class of `precision.keep` is one of those of the model's modules.

    Raises:
        ConfigError: the model has no such module.
    """
    for name in keep:
        if name not in classes:
            known = sorted(set(classes) - {"object", "Module"})
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(known)}"
            raise ConfigError(
                f"precision.keep = {list(keep)}: the model has no module of class {name}; {hint}"
            )


_INSTEAD = {  # of DeepSpeed's arguments
    "args": "config=..., a TOML file, a dict or an axrt.Config",
    "model_parameters": (
        "optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), a function that is given them"
    ),
    "training_data": "engine.train_batch(batches) with batches = iter(DataLoader(...)), made once",
    "collate_fn": (
        "engine.train_batch(batches) with batches = iter(DataLoader(..., collate_fn=...)), made "
        "once"
    ),
    "lr_scheduler": "lr_schedule=lambda step: a factor on the learning rate",
    "config_params": "config=..., a TOML file, a dict or an axrt.Config",
    "mpu": "[parallel] pipe and data in config",
    "mesh_param": "[parallel] pipe and data in config",
    "distributed_port": "nothing: the launcher's environment says it",
    "dist_init_required": "nothing: the launcher's environment says it",
}


def check_arguments(unknown: Collection[str]) -> None:
    """Refuse the arguments that `initialize` does not take.

    Raises:
        ConfigError: DeepSpeed's initialize takes the argument; the text says what axrt takes
            instead.
        TypeError: any other name.
    """
    for name in unknown:
        if name not in _INSTEAD:
            raise TypeError(f"initialize() got an unexpected keyword argument {name!r}")
        raise ConfigError(f"initialize does not take {name}; expected {_INSTEAD[name]}")


def as_failure(error: BaseException) -> BaseException:
    """The error with which a call of the engine has failed.

    An exit that claims success becomes an `AxrtError`: the call was not done.
    """
    if not isinstance(error, SystemExit) or error.code:
        return error
    exit_ = AxrtError(
        f"sys.exit({error.code if error.code is not None else ''}) was called {_place_of(error)}, "
        "within a call of the engine, which was "
        "not done; expected a call of it between those, or an exception"
    )
    exit_.__cause__ = error
    return exit_


def exit_refused(factory: str, error: SystemExit) -> ConfigError:
    """The error for a factory of models that ends the process instead of returning a model."""
    return ConfigError(
        f"model.factory = {factory!r}: sys.exit was called {_place_of(error)}; expected a "
        "PipelineModule that is returned"
    )


def _place_of(error: BaseException) -> str:
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"in {last.name}, {last.filename}:{last.lineno}"


def checked_sample(sample: Any, purpose: str) -> tuple[Any, Any]:
    """The sample as (inputs, targets).

    Raises:
        ConfigError: there is none, or it is no pair.
    """
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        given = "none was given" if sample is None else f"sample is of type {type(sample).__name__}"
        raise ConfigError(
            f"{purpose} with a microbatch, and {given}; expected axrt.initialize(..., "
            "sample=(inputs, targets)), or another setting"
        )
    inputs, targets = sample
    return inputs, targets


def check_backend(name: str) -> None:
    """Check the name of a backend of torch.compile; "" is none.

    Raises:
        ConfigError: torch has no such backend.
    """
    if not name:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"expected '' or one of {', '.join(torch.compiler.list_backends())}"
        )
        raise ConfigError(f"run.compile = {name!r}; {hint}")


def warn_of_equal_readers(digests: Mapping[int, str], new: int) -> None:
    """Warn where a replica has read the same first microbatch as another.

    Args:
        digests: digest of the first microbatch, by replica.
    """
    twins = [
        replica for replica, digest in digests.items() if replica != new and digest == digests[new]
    ]
    if twins:
        warnings.warn(
            f"replicas {min(twins[0], new)} and {max(twins[0], new)} have read the same first "
            "microbatch; expected each to read its own "
            "part of the data: give train_batch what engine.data_rank of engine.data_size should "
            "see",
            stacklevel=2,
        )


def refuse_shared_parameters(model: PipelineModule, cuts: list[int]) -> None:
    """Check that no parameter is used by two stages, where each rank would train its own copy.

    Modules that are given as they are may share parameters within a stage.

    Raises:
        ConfigError: a parameter is shared between stages.
    """
    stage_of: dict[int, int] = {}
    for stage, (first, end) in enumerate(pairwise(cuts)):
        for layer in model.layers[first:end]:
            for parameter in getattr(layer, "parameters", list)():
                if stage_of.setdefault(id(parameter), stage) != stage:
                    raise ConfigError(
                        f"a parameter is shared between stage {stage_of[id(parameter)]} and stage "
                        f"{stage}; expected an "
                        "axrt.TiedLayerSpec for each layer that shares it, or parallel.partition "
                        "set so that they are in one stage"
                    )
