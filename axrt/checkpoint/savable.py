"""What a checkpoint can hold of a model, looked at before the first step."""

# What no checkpoint can hold is refused before the first step, and not at the first save, hours
# later. A layer that loads in a way of its own is tried on a copy: what it loads must be what it
# saves, or a run that goes on would begin from other values without a word.

import copy

import torch
from torch import nn

from axrt.errors import DataError
from axrt.store.local_model import LocalModel

from .extra_state import has_own_loading, is_extra
from .layers import weights_of


def check_savable(model: LocalModel) -> None:
    """Check at the start that a checkpoint can hold what layers have, and not at the first save.

    Raises:
        DataError: the state of a layer has what no file can hold, or values that are made for the
            state dict alone, or it loads other values than it saves.
    """
    for place, layer in model.layers():
        own = [*layer.parameters(), *layer.buffers()]
        known = set(map(id, own))
        memory = {of.untyped_storage().data_ptr() for of in own if of.layout is torch.strided}
        for name, value in weights_of(place, layer):
            is_own = id(value) in known or value.layout is not torch.strided
            is_own = is_own or is_extra(name) or not value.numel()
            if not is_own and value.untyped_storage().data_ptr() not in memory:
                raise DataError(
                    f"{name} is made for the state dict alone, and is no parameter or buffer of "
                    f"layer {place}; expected these themselves, since what is loaded is copied "
                    "into them"
                )
        loads = [name for name, of in layer.named_modules(prefix=str(place)) if has_own_loading(of)]
        if loads and any(bucket.has_residencies for bucket in model.buckets_with(layer)):
            raise DataError(
                f"{loads[0]} loads in a way of its own, and its weights are not here between steps "
                "(memory.zero = 3 or memory.offload_parameters); expected memory.zero = 2 at most, "
                "and weights on the device"
            )
        if loads:
            _check_own_loading(place, layer)


def _check_own_loading(place: int, layer: nn.Module) -> None:
    """Check that a layer's own way to load gives it the values that it is given."""
    state = {
        name: value.clone() for name, value in layer.state_dict().items() if not is_extra(name)
    }
    trial = copy.deepcopy(layer)
    with torch.no_grad():
        trial.load_state_dict({**layer.state_dict(), **state})
    for name, value in trial.state_dict().items():
        if not is_extra(name) and not torch.equal(value, state[name]):
            raise DataError(
                f"{place}.{name} has other values when layer {place} has loaded what it saves; "
                "expected a way to load that takes values as they are"
            )
