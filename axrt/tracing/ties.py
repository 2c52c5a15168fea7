"""Weights that several layers of a graph read."""

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from axrt.model.layers import Layer, TiedLayerSpec

from .layer import TracedLayer, place_in

Names = dict[int, str]  # what each layer that reads a parameter calls it, by the layer's index


def tied(layers: Sequence[TracedLayer]) -> list[Layer]:
    """The layers, with those tied that read the same parameters.

    A tied layer has one key. Where some parameters are read by these layers and others by those,
    all of them have all.
    """
    parameters: dict[int, nn.Parameter] = {}
    names: dict[int, Names] = defaultdict(dict)
    for place, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            parameters[id(parameter)] = parameter
            names[id(parameter)][place] = name
    shared = {key: of for key, of in names.items() if len(of) > 1}
    found: list[Layer] = list(layers)
    for group in _groups(list(shared.values())):
        of_group = {key: of for key, of in shared.items() if group & of.keys()}
        called = [next(iter(of.values())) for of in of_group.values()]
        for place in group:
            for (key, of), name in zip(of_group.items(), called, strict=True):
                if place not in of:
                    of[place] = name
                    place_in(layers[place], name, parameters[key], True)
            mine = [of[place] for of in of_group.values()]
            found[place] = TiedLayerSpec(called[0], layers[place], tied_weight_attr=mine)
    return found


def _groups(readers: Sequence[Names]) -> list[set[int]]:
    """Sets of layers that have no parameter in common."""
    groups: list[set[int]] = []
    for of in readers:
        near = [group for group in groups if group & of.keys()]
        groups = [group for group in groups if group not in near]
        groups.append(set(of).union(*near))
    return groups
