"""`deepspeed.pipe`: a model as a list of layers, with DeepSpeed's arguments."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from axrt.errors import ConfigError
from axrt.model import module
from axrt.model.layers import Layer, LayerSpec, TiedLayerSpec
from axrt.world.launchers import told

from .runtime.pipe.topology import PipeDataParallelTopology

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class PipelineModule(module.PipelineModule):
    """A model with DeepSpeed's arguments, see `axrt.PipelineModule`.

    Args:
        layers: modules, `LayerSpec`s and functions.
        num_stages: ranks of a pipeline; None: as the topology says.
        topology: pipelines and replicas; None: as many replicas as the job has ranks for.
        loss_fn: function whose `loss_fn(outputs, targets)` is the loss; None: what the last layer
            returns.
        seed_layers: the weights of a LayerSpec come from `base_seed`; False: from the seed that
            torch has when `initialize` is called. They depend on the layer's index, too.
        base_seed: that seed.
        partition_method: "parameters", "uniform" or "type:REGEX".
        activation_checkpoint_interval: 0 keeps activations; any other number recomputes those of
            all layers.
        dynamic_shape: shapes may differ between microbatches; here they always may.
        seed_fn, activation_checkpoint_func, checkpointable_layers: only None is accepted.
    Raises:
        ConfigError: an argument has no counterpart, or neither `num_stages` nor `topology` is
            given.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_stages: int | None = None,
        topology: PipeDataParallelTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: None = None,
        checkpointable_layers: None = None,
        dynamic_shape: bool = False,
    ) -> None:
        _refuse("seed_fn", seed_fn, "seed_layers=True and base_seed")
        _refuse("activation_checkpoint_func", activation_checkpoint_func, "None: layers run again")
        _refuse(
            "checkpointable_layers",
            checkpointable_layers,
            'None, and "axrt": {"memory": {"recompute": N}} in the JSON configuration for the '
            "first N layers of each stage",
        )
        if topology is None and num_stages is None:
            raise ConfigError("num_stages and topology are None; expected one of them")
        super().__init__(layers, loss_fn or _given_by_the_model, partition_method=partition_method)
        self.pipe_ranks = topology.pipe if topology else num_stages
        self.replicas = topology.data if topology else None
        self.recomputes = bool(activation_checkpoint_interval)
        self._told = False
        self.base_seed = base_seed if seed_layers else None

    @property
    def builds_later(self) -> bool:
        """There are layers of LayerSpecs, which the ranks build that hold them."""
        return any(isinstance(layer, LayerSpec) for layer in self.layers)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of modules that are given as they are; layers of LayerSpecs are not built
        yet."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names, `INDEX.NAME`. A line says where some are not there yet."""
        if self.builds_later and not self._told:
            self._told = True
            if ((launched := told()) is None) or launched.rank == 0:  # once in a job
                print(
                    "axrt: parameters() gives those of modules alone: layers of LayerSpecs are "
                    "built later, by initialize, on the ranks that hold them",
                    file=sys.stderr,
                )
        for index, layer in enumerate(self.layers):
            if isinstance(layer, nn.Module):
                yield from layer.named_parameters(prefix=str(index))


def _given_by_the_model(outputs: Any, targets: Any) -> Any:
    return outputs


def _refuse(name: str, value: object, instead: str) -> None:
    if value is not None:
        raise ConfigError(f"PipelineModule: {name} has no counterpart; expected {instead}")
