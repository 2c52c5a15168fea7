"""How members of a team cut a model, in the words of torch and of transformers."""

from collections.abc import Iterator, Mapping, Sequence
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
        ConfigError: there is none.
    """
    found = {
        f"*.{name.partition('.*.')[2]}": way
        for layer in layers
        for plan in _plans_in(layer)
        for name, way in plan.items()
        if ".*." in name
    }
    if not found:
        raise ConfigError(
            "tensor = 'auto', and no layer is of a transformers model whose configuration has a "
            "base_model_tp_plan; expected such LayerSpecs, or a dict of words by patterns of names"
        )
    return in_our_words(found)


def _plans_in(layer: Layer) -> Iterator[Mapping[str, str]]:
    module: Any = without_memory(layer) if isinstance(layer, LayerSpec) else layer
    for one in module.modules() if isinstance(module, nn.Module) else ():
        plan = getattr(getattr(one, "config", None), "base_model_tp_plan", None)
        if isinstance(plan, Mapping):
            yield plan
