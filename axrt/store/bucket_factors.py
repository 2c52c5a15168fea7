"""What the matrices of a bucket are given in a step, where the optimizer wants to know (K-FAC), and
their gradients as it changes them."""

# Only the owner of a matrix looks at what it is given. So where a bucket has several copies, each
# must have matrices of its own (ZeRO), or copies would go apart without a word.

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from axrt.errors import ConfigError, ModelError
from axrt.model.factor_sums import FactorSums, watch
from axrt.model.stage import Stage

from .kfac import KfacAndAdamW
from .norms import Norms
from .routes import OnDevice


class BucketFactors:
    """Of a bucket whose optimizer is another one it does nothing.

    Args:
        stepped: what is stepped here.
        places: numbers that order it as the whole model does.
        copies: number of copies of the bucket.
        microbatches: number of those of a step, over all replicas.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        stepped: Sequence[nn.Parameter],
        places: Tensor,
        copies: int,
        microbatches: int,
    ) -> None:
        self._optimizer = optimizer if isinstance(optimizer, KfacAndAdamW) else None
        self._stepped, self._places, self._copies = stepped, places, copies
        self._microbatches = max(1, microbatches // copies)
        self._handles: list[RemovableHandle] = []
        self._sums: dict[str, FactorSums] = {}  # by the name of the matrix
        self._names: list[str] = []  # of what is stepped here
        self._slopes: list[tuple[int, Tensor]] = []  # of this step, by place in what is stepped

    def watch(self, stage: Stage, named: Mapping[str, nn.Parameter], has_shard: bool) -> None:
        """Add up what matrices are given, until `release`.

        Args:
            stage: stage that has the bucket.
            named: what is stepped here, by the name of the parameter.
            has_shard: copies share out what they step.
        Raises:
            ConfigError: several copies would step the same matrix.
        """
        self._names = list(named)
        for name, parameter in named.items() if self._optimizer else ():
            assert self._optimizer is not None
            sums = self._optimizer.sums_of(parameter, self._copies)
            if sums is None:
                continue
            if self._copies > 1 and not has_shard:
                raise ConfigError(
                    f"optimizer.name = 'kfac' and {self._copies} copies of {name}, whose factors "
                    "would differ; expected memory.zero = 1 or more, so that one of them steps it"
                )
            place, _, path = name.partition(".")
            module = stage.layers[place].get_submodule(path.rpartition(".")[0])
            assert isinstance(module, nn.Linear), "presets have looked"
            self._handles.append(watch(module, sums, stage.deferral))
            self._sums[name] = sums

    def open(self) -> None:
        """Backwards of a step begin, or those that a reduction adds up."""
        for sums in self._sums.values():
            sums.is_open = True

    def close(
        self, named: Sequence[tuple[str, nn.Parameter]], added_to: Sequence[nn.Parameter]
    ) -> None:
        """They have ended.

        Args:
            named: parameters of the bucket with their names.
            added_to: those to whose gradients they have added.
        Raises:
            ModelError: a weight's gradient is of more than what its module was given.
        """
        for (name, _), parameter in zip(named, added_to, strict=True) if self._sums else ():
            if name not in self._sums:
                continue
            sums = self._sums[name]
            sums.is_open = False
            if not sums.are_all_of(parameter.grad):
                raise ModelError(
                    f"the gradient of {name} is not that of what its torch.nn.Linear was given: "
                    "the weight is used without calling the module, or a hook changes its "
                    "gradient; expected optimizer.matrices without it, since optimizer.name = "
                    "'kfac' would have wrong factors"
                )

    def scale(self, factor: float | Tensor, weight: float | None) -> None:
        """Multiply gradients of the outputs by a number, as the bucket's gradient is.

        Args:
            weight: sum of the weights of all losses; None: they are means.
        """
        if self._optimizer:
            self._optimizer.scale_sums(factor, weight)

    def precondition(self, route: OnDevice) -> Norms:
        """Turn gradients of matrices into changes.

        Returns:
            The sum of the products of both by element, of each matrix, as `Bucket.norms` gives
            norms.
        Raises:
            ModelError: a weight is used twice in a forward.
        """
        for name, sums in self._sums.items():
            if sums.uses > self._microbatches:
                raise ModelError(
                    f"{name} is used {sums.uses} times in {self._microbatches} microbatches, and "
                    "optimizer.name = 'kfac' has no factors of such weights; expected "
                    "optimizer.matrices without it"
                )
        found: list[tuple[int, Tensor]] = []
        for place, gradient in route.gradients() if self._optimizer else ():
            assert self._optimizer is not None
            parameter = self._stepped[place]
            slope = self._optimizer.precondition(parameter, gradient)
            if route.makes_total_late:
                self._optimizer.forget(parameter)
            if slope is not None:
                found.append((place, slope))
        self._slopes = found
        if not found:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        route.keep_changed()
        slopes = torch.stack([slope for _, slope in found])
        return self._places[[place for place, _ in found]], slopes.to("cpu", non_blocking=True)

    def hear(self, slope: Tensor) -> None:
        """Take the sum over all matrices of the model, shape ()."""
        if self._optimizer:
            self._optimizer.slope = slope

    def warn(self) -> None:
        """Name the matrices because of which a step is dropped, whose gradients are numbers.

        Raises:
            ModelError: a factor of one has no inverse.
        """
        for place, slope in self._slopes:
            if not slope.isfinite():
                assert self._optimizer is not None
                name = self._names[place]
                self._optimizer.check_inverses(self._stepped[place], name)
                warnings.warn(
                    f"the inputs of {name}, or the gradients of its outputs, are so large that its "
                    "factors or its change are no finite numbers, and so this step is skipped",
                    stacklevel=2,
                )

    def release(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Drop what was added up."""
        if self._optimizer:
            self._optimizer.forget_step()

    @property
    def num_bytes(self) -> int:
        """Size of the sums."""
        return sum(one.nbytes for of in self._sums.values() for one in (of.inputs, *of.outputs))
