"""The model that a configuration names: a built-in one, or the user's own."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.model import PipelineModule
from axrt.model.preflight import exit_refused
from axrt.models.gpt import gpt


def model_of(config: Config) -> PipelineModule:
    """The model that `[model]` describes.

    Raises:
        ConfigError: `model.factory` cannot be imported, returns something else, or ends the
            process.
    """
    if not config.model.factory:
        return gpt(config)
    try:
        return _made_by_factory(config)
    except SystemExit as error:
        raise exit_refused(config.model.factory, error) from error


def _made_by_factory(config: Config) -> PipelineModule:
    module_name, colon, name = config.model.factory.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        if not (colon and name and all(module_name.split("."))):
            raise ConfigError(
                f"model.factory = {config.model.factory!r}; expected 'package.module:function'"
            )
        factory = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.factory = {config.model.factory!r}: {error}; expected one that can be imported "
            f"from {os.getcwd()}"
        ) from None
    if callable(factory) and not _takes_one(factory):
        raise ConfigError(
            f"model.factory = {config.model.factory!r}: {name} cannot be called with one argument; "
            "expected one that takes the Config"
        )
    model = factory(config) if callable(factory) else None
    if not isinstance(model, PipelineModule):
        found = (
            f"returned {type(model).__name__}" if callable(factory) else f"is not in {module_name}"
        )
        raise ConfigError(
            f"model.factory = {config.model.factory!r}: {name} {found}; expected a function that "
            "returns a PipelineModule"
        )
    return model


def _takes_one(factory: Callable[..., Any]) -> bool:
    try:
        inspect.signature(factory).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C, says nothing of itself
        return True
    return True
