"""How members of a team cut a model, in the words of torch and of transformers."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from torch import nn

from axrt.errors import ConfigError

from .layers import Layer, LayerSpec, without_memory

AUTO = "auto"  # the plan that a transformers model brings
_OURS = {"colwise": "column", "rowwise": "row", "packed_colwise": "column:2"}
# What such a module makes is the same on all members: here that of any module that nobody names.
_WHOLE = {
    "colwise_rep",
    "colwise_gather_output",
    "embedding_rowwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
}


def in_our_words(plan: object) -> dict[str, str]:
    """A plan in the words of `tensor_plan.py`; what another library leaves whole is left out.

    Raises:
        ConfigError: it has no words by names.
    """
    if plan is None:
        return {}
    if not isinstance(plan, Mapping) or not all(isinstance(of, str) for of in chain(*plan.items())):
        raise ConfigError(
            f"tensor = {plan!r}; expected a dict of words by patterns of names, or 'auto'"
        )
    return {name: _OURS.get(way) or way for name, way in plan.items() if way not in _WHOLE}


def plan_of(layers: Sequence[Layer]) -> dict[str, str]:
    """The plan that layers of a transformers model bring: `base_model_tp_plan` of its
    configuration.

    Raises:
        ConfigError: there is none, or layers bring different ones.
    """
    found: dict[str, str] = {}
    for layer in layers:
        for name, way in _plans_in(layer):
            if found.setdefault(name, way) != way:
                raise ConfigError(
                    f"tensor = 'auto': {name} is {found[name]!r} in the plan of one layer and "
                    f"{way!r} in that of another; expected layers of one model, or a dict of words"
                )
    if not found:
        raise ConfigError(
            "tensor = 'auto', and no layer is of a transformers model whose configuration has a "
            "base_model_tp_plan; expected such LayerSpecs, or a dict of words by patterns of names"
        )
    return in_our_words(found)


def _plans_in(layer: Layer) -> Iterator[tuple[str, str]]:
    """The words for what a layer has, each with a pattern of names."""
    module: Any = without_memory(layer) if isinstance(layer, LayerSpec) else layer
    if not isinstance(module, nn.Module):
        return
    names = [f".{name}" for name, _ in module.named_modules()]
    for one in module.modules():
        plan = getattr(getattr(one, "config", None), "base_model_tp_plan", None)
        for name, way in plan.items() if isinstance(plan, Mapping) else ():
            pattern = f"*.{name.partition('.*.')[2]}"
            if any(fnmatchcase(have, pattern) for have in names):
                yield pattern, way
