"""The model a user writes: a list of layers and a loss."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch import Tensor, nn

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.scheduler.plural import plural

from .hidden import check_none_hidden
from .hints import why_missing
from .layers import Layer, TiedLayerSpec, build, places_of, refusal_of, share, told
from .loss import Loss, check_has_shapes, has_tensors
from .partition import boundaries
from .tensor_plan import check_cuts, check_plan
from .tensor_words import AUTO, in_our_words, plan_of

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | float]]


class PipelineModule:
    """A model as a sequence of layers, each called with the one value that the layer before
    returned.

    Args:
        layers: an `nn.Sequential`, or modules, `LayerSpec`s and plain functions in any mix. A tuple
            that a layer returns stays one argument of the next.
        loss_fn: function whose `loss_fn(outputs, targets)` gives the mean loss of a microbatch, a
            tensor with one element. Where microbatches count differently it gives (sum, weight):
            the loss of a step is then the sum of sums over the sum of weights, over all
            microbatches of all replicas. A module with parameters or buffers becomes the last
            layer, whose names begin with `N.loss.` behind N layers; it is trained and saved as they
            are.
        partition_method: method by which stages are cut, see `axrt.model.partition.boundaries`;
            `[parallel] partition` overrides it.
        num_stages: number of stages that a pipe must have; None: any.
        seed_layers: only True is accepted: the weights of a `LayerSpec` always depend on (seed,
            layer). A module given as it is keeps the weights that it has on the rank that holds it:
            seed torch before you make it.
        activation_checkpoint_interval: only 0 is accepted; `memory.recompute` says which layers are
            recomputed.
        topology: only None is accepted; `[parallel]` says how ranks are laid out.
        tensor: how members of a team share the model out (`parallel.tensor`): words by patterns of
            names, such as {"*.up": "column", "*.down": "row"} for linear modules. "column:3" cuts
            each of three blocks of outputs, "divide" an attribute that counts heads. "token" names
            layers by their index, or the "loss", that take each token by itself; all others see all
            tokens. Words of torch, such as "colwise", mean the same. "auto" takes the plan that
            layers of a transformers model bring.
    Raises:
        ConfigError: there are no layers, one is no layer or a LayerSpec that cannot be built, a
            function hides weights of a module, or an option is not taken.

    Modules that are given as they are run and are trained as they are: the user's own objects get
    the new weights. Under a policy that splits backwards each of their modules that is exactly
    `torch.nn.Linear` is of a subclass that computes the same, `axrt.model.deferral.Linear`, until
    the engine is closed.
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[Layer],
        loss_fn: LossFunction,
        *,
        partition_method: str | Sequence[int] = "uniform",
        num_stages: int | None = None,
        seed_layers: bool = True,
        activation_checkpoint_interval: int = 0,
        topology: object = None,
        tensor: Mapping[str, str] | Literal["auto"] | None = None,
    ) -> None:
        self.layers: list[Layer] = _listed(layers)
        self.loss_fn = loss_fn
        self.partition_method = partition_method
        self.num_stages = num_stages
        if not self.layers:
            raise ConfigError("a PipelineModule needs at least one layer, got none")
        for index, layer in enumerate(self.layers):
            if refusal := refusal_of(layer):
                raise ConfigError(f"layer {index} is {told(layer)}{refusal}")
        modules = [layer for layer in self.layers if isinstance(layer, nn.Module)]
        listed = {id(parameter) for module in modules for parameter in module.parameters()}
        for index, layer in enumerate(self.layers):
            check_none_hidden(f"layer {index}", layer, listed)
            if isinstance(layer, TiedLayerSpec):
                check_none_hidden(f"forward_fn of layer {index}", layer.forward_fn, listed)
        self.tensor = plan_of(self.layers) if tensor == AUTO else in_our_words(tensor)
        check_plan(self.tensor)
        check_has_shapes(loss_fn)
        check_none_hidden("loss_fn", loss_fn, listed)
        if isinstance(loss_fn, nn.Module) and has_tensors(loss_fn):
            self.layers.append(Loss(loss_fn))
        if topology is not None:
            raise ConfigError(
                "topology is not taken: set [parallel] pipe and data in the configuration instead"
            )
        if activation_checkpoint_interval:
            raise ConfigError(
                f"activation_checkpoint_interval = {activation_checkpoint_interval} is not taken: "
                "set memory.recompute in "
                "the configuration, to 'full' or a number of layers of each stage, which then run "
                "forward again instead of being kept"
            )
        if not seed_layers:
            raise ConfigError(
                "seed_layers = False: the weights of a LayerSpec always depend on the seed and its "
                "place; expected True"
            )

    if not TYPE_CHECKING:  # a type checker knows what there is

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(why_missing(name))

    def check_settings(self, config: Config) -> None:
        """Check that the model can be trained with these settings: a list of layers with all, where
        it says how members of a team share it out.

        Raises:
            ConfigError: it cannot.
        """
        check_cuts(self, config.parallel)

    def sequential(self, seed: int) -> nn.Sequential:
        """The whole model in one process, with the weights that a run with this seed starts from.

        Modules that are given as they are are copied, so that training one does not change the
        other; tied layers share their parameter.

        Args:
            seed: run seed (`run.seed`), 0 <= seed < 2**63.
        """
        whole = copy.deepcopy(
            [build(self.layers, index, seed) for index in range(len(self.layers))]
        )
        for key in {layer.key for layer in self.layers if isinstance(layer, TiedLayerSpec)}:
            first, *others = places_of(self.layers, key)
            for other in others:
                share(self.layers, first, whole[first], other, whole[other])
        return nn.Sequential(*whole)

    def boundaries(
        self,
        stages: int,
        override: str | Sequence[int] = "",
        held: Sequence[Sequence[int]] | None = None,
    ) -> list[int]:
        """The indices of the layers at which stages begin, then the number of layers.

        Args:
            stages: number of stages of a pipe.
            override: method that replaces `partition_method`; "" leaves it.
            held: for each rank the stages that it holds; None: one rank a stage.
        Raises:
            ConfigError: the layers cannot be cut so, or `num_stages` asks for another number.
        """
        if self.num_stages not in (None, stages):
            raise ConfigError(
                f"the model asks for num_stages = {self.num_stages} and the run's pipeline has "
                f"{plural(stages, 'stage')}; expected as many. Leave num_stages away, or change "
                "the number of ranks or schedule.placement"
            )
        cuts = boundaries(self.layers, stages, override or self.partition_method, held)
        if isinstance(self.layers[-1], Loss) and cuts[-2] == cuts[-1]:
            raise ConfigError(
                f"cuts {cuts} leave the last stage without a layer, and the loss, which has "
                "weights or buffers of its own, is computed there; expected the last layer in the "
                "last stage"
            )
        return cuts


def _listed(layers: Any) -> list[Layer]:
    try:
        return list(layers)
    except TypeError:
        raise ConfigError(
            f"layers is {layers!r}; expected an nn.Sequential or a list of modules, LayerSpecs and "
            "functions"
        ) from None
