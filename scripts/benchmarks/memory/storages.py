"""The bytes of weights, gradients and optimizer state at the peak of a step, counted alike for all.

A contestant names the tensors that it has now. They are looked at again and again within a step:

    after every forward of a module that has parameters of its own
    when a parameter's gradient has been added to
    before and after every step of an optimizer, and of all

A storage counts once, by its address, with all of its bytes. It counts from when a tensor in it was
first seen until it is freed or shrunk, so a gradient that a runtime still sends counts as well.
Nothing counts that lives between two looks alone, nor do activations and messages.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers


class Storages:
    """The storages of tensors that were seen, which are not kept alive.

    Args:
        held: function that gives the tensors that there are now.
    Attributes:
        most: most bytes that any look has found.
    """

    def __init__(self, held: Callable[[], Iterable[Tensor]]) -> None:
        self._held = held
        self._seen: dict[int, StorageWeakRef] = {}
        self.most = 0

    def look(self, *_: object) -> None:
        """Count what there is now; it may be called as a hook of any kind."""
        for tensor in self._held():
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage.device.type != "meta":
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._seen.setdefault(reference.cdata, reference)
        self.most = max(self.most, self._num_bytes())

    def _num_bytes(self) -> int:
        sizes: dict[int, int] = {}
        for key in list(self._seen):
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is None:
                del self._seen[key]
            else:
                sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())


@contextmanager
def looking(storages: Storages) -> Iterator[None]:
    """Context within which the storages are looked at, at all of these moments."""
    watched: set[int] = set()
    with ExitStack() as stack:

        def after(module: nn.Module, *_: object) -> None:
            own = [one for one in module.parameters(recurse=False) if one.requires_grad]
            for parameter in own:
                if id(parameter) not in watched:
                    watched.add(id(parameter))
                    handle = parameter.register_post_accumulate_grad_hook(storages.look)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            if own:
                storages.look()

        for handle in (
            modules.register_module_forward_hook(after),
            optimizers.register_optimizer_step_pre_hook(storages.look),
            optimizers.register_optimizer_step_post_hook(storages.look),
        ):
            stack.callback(handle.remove)
        storages.look()
        yield
        storages.look()
