"""The parameters that layers had when an engine took them. What is unfrozen, replaced or added
later and wants to be trained never would be, since no bucket has it: it is refused by name."""

from collections.abc import Iterable

from torch import nn

from axrt.errors import ModelError

_INSTEAD = "expected that before axrt.initialize: save, close this engine, and make another one"


class ListedParameters:
    """Parameters and submodules of layers, and which of the parameters were frozen.

    Args:
        layers: the layers, each with its index in the model.
    """

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        self._modules = [
            (prefix, module, dict(module._parameters), dict(module._modules))
            for place, layer in layers
            for prefix, module in layer.named_modules(prefix=str(place))
        ]
        self._frozen = [
            (f"{prefix}.{name}", parameter)
            for prefix, _, parameters, _ in self._modules
            for name, parameter in parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]

    def check(self) -> None:
        """Check that layers have what they had.

        Raises:
            ModelError: a parameter was unfrozen, replaced or added, or a module was.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ModelError(
                    f"{name} was frozen when the engine took it, and has requires_grad = True now; "
                    f"{_INSTEAD}"
                )
        for prefix, module, *before in self._modules:
            for now, then in zip((module._parameters, module._modules), before, strict=True):
                for name, one in now.items():
                    if one is not None and then.get(name) is not one and _trains(one):
                        how = "replaced" if then.get(name) is not None else "added"
                        raise ModelError(
                            f"{prefix}.{name} was {how} after the engine took the layer, and "
                            f"nothing would train it; {_INSTEAD}"
                        )


def _trains(one: nn.Parameter | nn.Module) -> bool:
    """A parameter that wants a gradient, or a module with one."""
    of = one.parameters() if isinstance(one, nn.Module) else (one,)
    return any(parameter.requires_grad for parameter in of)
