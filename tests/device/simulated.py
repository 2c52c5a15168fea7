"""A simulated accelerator: a device of torch's own, "sim", whose operators run on the CPU when they
are launched, so that their bits are the CPU's; and a checker that knows what had to wait for what.

Tensors, streams, events, autograd's threads and pinned memory are torch's own, on the device type
that torch leaves to others (PrivateUse1). `accelerator.cpp` is what torch asks for in C++, and
operators come here. Each is a launch on the current stream, which reads and writes blocks of
memory. See `clocks.py` for what is found.

Not simulated: the time that anything takes, several devices, kernels whose bits differ from the
CPU's, and what a driver does by itself.
"""

import atexit
import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from axrt.runtime.loop import Loop
from axrt.transport import envelope, mpi
from axrt.workers.evaluation import WeightsOnDemand

from .clocks import HOST, Clocks, Span

NAME = "sim"
_SOURCE = Path(__file__).with_name("accelerator.cpp")
_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tuple(f"{_ROOT}/{folder}/" for folder in ("axrt", "scheduler", "offload", "tests"))
# Operators that take indices from the host, as those of CUDA do.
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "embedding_dense_backward")
# Operators whose results have a size that the host must read.
_HOST_READS = ("nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "repeat_interleave")
# Where the host may wait in the loop, and why.
ALLOWED_WAITS = {
    " _digest": "the first microbatch of a run is compared between replicas, once",
    " drain": "deterministic algorithms fill memory that MPI is to write to",
    "on demand: ": "an evaluation reads weights from a disk, which holds up who calls",
    "axrt/transport/payload.py": "a rank that computes on the CPU was given a batch on a device",
    "axrt/model/each_logit.py": "the first microbatch of a cut vocabulary is checked, once",
    "axrt/model/aside.py": "a layer as it is, whose functions run here, waits as it likes",
    "axrt/transport/local.py": "many ranks in one process are for tests",
}
_IN_LOOP = "in the loop: "
_aten = torch.ops.aten
_HANDLES = {
    "recorded": (ctypes.c_int64, ctypes.c_int64),
    "blocked": (ctypes.c_int64, ctypes.c_int64),
    "passed": (ctypes.c_int64,),
    "idle": (ctypes.c_int64,),
    "waited_for_event": (ctypes.c_int64,),
    "waited_for_stream": (ctypes.c_int64,),
    "freed": (ctypes.c_int64,),
    "allocated": (ctypes.c_int64, ctypes.c_int64),
    "filled": (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
}


class NoCompiler(RuntimeError):
    """There is no C++ compiler here."""


def built() -> Path:
    """The library of `accelerator.cpp`, built once for each version of it and of torch."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompiler("the simulated accelerator needs a C++ compiler: apt-get install g++")
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"axrt-simulated-{key}.so"
    if not library.exists():
        home = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / "simulated.so"
            subprocess.run(
                [
                    *(compiler, "-O0", "-shared", "-fPIC", "-std=c++20", str(_SOURCE)),
                    *(f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"),
                    *("-o", str(fresh), f"-L{home}/lib", "-lc10", "-ltorch_cpu", "-ltorch"),
                    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                ],
                check=True,
            )
            fresh.replace(library)  # whole or not at all: ranks may build it at the same time
    return library


@cache
def accelerator() -> "Accelerator":
    """The simulated accelerator of this process, installed at the first call."""
    return Accelerator()


class Accelerator:
    """A device of this process, which stays as long as the process.

    Attributes:
        clocks: the checker.
        generator: its random numbers, apart from the CPU's.
    """

    def __init__(self, seed: int = 0) -> None:
        self.clocks = Clocks(seed)
        self.generator = torch.Generator()
        self._library = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
        self._told = self._handles()
        self._alias = torch.ops.simulated.alias.default  # not by name at each operator
        self._adopt = torch.ops.simulated.adopt.default
        self._library.install(ctypes.byref(self._told))
        atexit.register(self._library.be_silent)
        torch.utils.backend_registration.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, self._module())  # type: ignore[no-untyped-call]
        self._kernels = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        self._kernels.fallback(self._run, "PrivateUse1")  # type: ignore[no-untyped-call]
        _PinnedMemory(self).__enter__()  # type: ignore[no-untyped-call]
        self._watch(mpi, "_pieces", writes=("_open",))
        self._watch(envelope, "_memory_of", writes=("_copied_from",))

    def _watch(self, module: types.ModuleType, name: str, writes: Sequence[str]) -> None:
        """Hear which memory a function of the transport shows to the host or to MPI.

        Args:
            module: module of the transport.
            name: name of the function, whose first argument is a tensor.
            writes: functions that call it in order to write.
        """
        shows = getattr(module, name)

        def watched(tensor: Tensor, *others: Any) -> Any:
            if _is_mine(tensor) or tensor.is_pinned():
                caller = sys._getframe(1).f_code.co_name
                self.host_touches(tensor, caller in writes, name)
            return shows(tensor, *others)

        setattr(module, name, watched)

    def _handles(self) -> ctypes.Structure:
        """What the library calls, as a struct of functions in the order of `Told`."""
        clocks = self.clocks
        calls: dict[str, Callable[..., Any]] = {
            "recorded": clocks.record,
            "blocked": clocks.block,
            "passed": clocks.has_passed,
            "idle": clocks.is_idle,
            "waited_for_event": lambda event: clocks.wait_for_event(event, _where()),
            "waited_for_stream": lambda stream: clocks.wait_for_stream(stream, _where()),
            "freed": lambda address: clocks.free(address, _where()),
            "allocated": clocks.allocate,
            "filled": self._filled,
        }
        fields = [
            (name, ctypes.CFUNCTYPE(ctypes.c_int if name in ("passed", "idle") else None, *takes))
            for name, takes in _HANDLES.items()
        ]
        told = type("Told", (ctypes.Structure,), {"_fields_": fields})
        handles: ctypes.Structure = told(*[kind(calls[name]) for name, kind in fields])
        return handles

    def _module(self) -> types.ModuleType:
        """What torch expects of a module `torch.sim`."""
        module: Any = types.ModuleType(f"torch.{NAME}")
        module.is_available = module.is_initialized = lambda: True
        module._is_in_bad_fork = lambda: False
        module._lazy_init = lambda: None
        module.device_count = lambda: 1
        module.current_device = lambda: 0
        module.set_device = lambda device: None
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        module.default_generators = (self.generator,)
        module.manual_seed_all = self.generator.manual_seed
        module.get_rng_state = lambda device=None: self.generator.get_state()
        module.set_rng_state = lambda state, device=None: self.generator.set_state(state)
        module.get_device_properties = lambda device=None: types.SimpleNamespace(
            uuid="sim-0", name="a simulated accelerator", total_memory=1 << 34
        )
        return module  # type: ignore[no-any-return]

    # Operators.

    def _run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        of = _facts(operator)
        if operator is _aten._copy_from.default:
            return self._copy(*args, **kwargs)
        if operator is _aten.record_stream.default:
            return self._record(*args)
        tensors = _tensors((args, *kwargs.values()) if kwargs else args)
        mine = [tensor for tensor in tensors if not tensor.is_cpu]
        if len(mine) < len(tensors) and of.name not in _INDEXED:
            _check_not_mixed(of.name, tensors, mine)
        if of.is_view:
            return self._on_cpu(operator, args, kwargs)
        stream, what = _current(), f"{of.name}, {_place()}"
        self.clocks.launch(stream)
        written = _written(operator, args, kwargs)
        for tensor in mine:
            self._touch(stream, tensor, id(tensor) in written, what)
        if operator is _aten._local_scalar_dense.default or of.name in _HOST_READS:
            self.clocks.wait_for_stream(stream, f"{of.name}, {_where()}")
        with self._own_random_numbers() if of.is_random else nullcontext():
            made = self._on_cpu(operator, args, kwargs)
        for tensor in _tensors(made):
            if not tensor.is_cpu and not self.clocks.knows(_address(tensor)):
                self.clocks.allocate(_address(tensor), stream)
                self._touch(stream, tensor, True, what)
        return made

    def _filled(self, address: int, size: int, stream: int) -> None:
        """torch fills memory that it has allocated on the device."""
        self.clocks.launch(stream)
        self.clocks.touch(stream, address, Span(0, size), True, f"empty, {_place()}")

    def _record(self, tensor: Tensor, stream: torch.Stream) -> None:
        if address := _address(tensor):  # a tensor without elements may have no memory
            self.clocks.tell_allocator(address, stream.stream_id)

    def _on_cpu(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """The operator on the memory of its tensors, seen from the CPU."""
        given: dict[int, tuple[Tensor, Tensor]] = {}

        def seen(value: Any) -> Any:
            if isinstance(value, Tensor):
                if value.is_cpu:
                    return value
                shown = self._alias(value)
                given[id(shown)] = value, shown
                return shown
            on_device = isinstance(value, torch.device) and value.type == NAME
            return torch.device("cpu") if on_device else value

        def adopted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in given:
                return given[id(value)][0]
            return self._adopt(value)

        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        made = operator(*_mapped(seen, args), **_mapped(seen, kwargs))
        for mine, shown in given.values():
            if mine.shape != shown.shape:
                raise NotImplementedError(f"{operator} gives a tensor of the device another shape")
        return _mapped(adopted, made)

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        """Bytes from the host to the device, back, or within the device."""
        stream, what = _current(), f"copy, {_place()}"
        self.clocks.launch(stream)
        for tensor, writes in ((source, False), (target, True)):
            if _is_mine(tensor) or tensor.is_pinned():
                self._touch(stream, tensor, writes, what)
        _seen(target).copy_(_seen(source))
        host = next((tensor for tensor in (source, target) if not _is_mine(tensor)), None)
        if host is None or not target.numel():
            return target
        if not non_blocking:
            self.clocks.wait_for_stream(stream, f"blocking copy, {_where()}")
        elif not host.is_pinned():
            self.clocks.wait_for_stream(stream, f"copy of memory that is not pinned, {_where()}")
        return target

    def launch_on(self, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Launch an operation that no kernel of torch's does: a library's."""
        what = f"a library, {_place()}"
        self.clocks.launch(stream)
        for tensor in reads:
            self._touch(stream, tensor, False, what)
        for tensor in writes:
            self._touch(stream, tensor, True, what)

    def _touch(self, agent: int, tensor: Tensor, writes: bool, what: str) -> None:
        address = _address(tensor)
        if not self.clocks.knows(address):
            self.clocks.allocate(address, _current() if _is_mine(tensor) else None)
        self.clocks.touch(agent, address, _span_of(tensor), writes, what)

    def check_clocks(self) -> None:
        """Check that nothing was found since the last call.

        Raises:
            AssertionError: races, memory used again too early, or waits of the host in the loop.
        """
        found = [f"{number} times {fault}" for fault, number in self.clocks.faults.items()]
        found += [
            f"{number} times the host waits in the loop: {wait}"
            for wait, number in self.clocks.waits.items()
            # In a layer or a loss of the user's he may wait as he likes.
            if f"{_IN_LOOP}axrt/" in wait and not any(map(wait.__contains__, ALLOWED_WAITS))
        ]
        self.clocks.faults.clear()
        self.clocks.waits.clear()
        assert not found, "\n".join(found)

    def host_touches(self, tensor: Tensor, writes: bool, what: str) -> None:
        """The host reads or writes memory of the device, or pinned memory."""
        self.clocks.acts()
        self._touch(HOST, tensor, writes, f"{what}, {_place()}")

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Context in which the CPU's generator goes on where the device's stands."""
        of_cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(of_cpu)


class _PinnedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears the host's own operators on pinned memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and each operator would pay for what hides it

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator = accelerator

    def __torch_dispatch__(
        self, operator: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = _tensors((args, *kwargs.values()) if kwargs else args)
        if all(leaf.is_cpu for leaf in leaves) and not _facts(operator).is_view:
            written = _written(operator, args, kwargs)
            for tensor in leaves:
                if tensor.device.type == "cpu" and tensor.is_pinned():
                    what = operator.__name__.partition(".")[0]
                    self._accelerator.host_touches(tensor, id(tensor) in written, what)
        return operator(*args, **kwargs)


def _is_mine(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _seen(tensor: Tensor) -> Tensor:
    shown: Tensor = torch.ops.simulated.alias(tensor) if _is_mine(tensor) else tensor
    return shown


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span_of(tensor: Tensor) -> Span:
    """The bytes of its storage from a tensor's first element to its last."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return Span(start, start)
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return Span(start, start + (int(last) + 1) * tensor.itemsize)


def _current() -> int:
    return torch.accelerator.current_stream().stream_id


class _Facts(NamedTuple):
    """What is asked of an operator at each launch."""

    name: str
    is_view: bool
    is_random: bool


@cache
def _facts(operator: Any) -> _Facts:
    name = operator.__name__.partition(".")[0]
    return _Facts(
        name,
        is_view=operator.is_view or name in ("_unsafe_view", "_reshape_alias"),
        is_random=torch.Tag.nondeterministic_seeded in operator.tags,
    )


def _written(operator: Any, args: Any, kwargs: Any) -> set[int]:
    """The ids of the tensors that an operator writes to, by its schema."""
    written: set[int] = set()
    for place, name in _is_written(operator):
        value = args[place] if place < len(args) else kwargs.get(name)
        written |= {id(tensor) for tensor in _tensors(value)}
    return written


@cache
def _is_written(operator: Any) -> list[tuple[int, str]]:
    """The place and the name of each argument that an operator writes to."""
    return [
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _check_not_mixed(name: str, tensors: list[Tensor], mine: list[Tensor]) -> None:
    for tensor in tensors if mine else []:
        if not _is_mine(tensor) and (tensor.dim() or "cat" in name):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {NAME}:0 and "
                f"{tensor.device} ({name})"
            )


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of an operator's arguments or results, which are nested in lists at most."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, list | tuple):
        for part in value:
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, list | tuple):
                found += _tensors(part)
    return found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same with each part changed."""
    if isinstance(value, list):
        return [_mapped(change, part) for part in value]
    if isinstance(value, tuple):
        return tuple([_mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()}
    return change(value)


def _where() -> str:
    """The innermost line of ours or of a test's that is being run."""
    frame: FrameType | None = sys._getframe(1)
    in_loop, on_demand = False, False
    while frame is not None:
        in_loop |= frame.f_code is Loop.run.__code__
        on_demand |= frame.f_code is WeightsOnDemand.bring.__code__
        frame = frame.f_back
    return f"{'on demand: ' * on_demand}{_IN_LOOP * in_loop}{_place()}"


def _place() -> str:
    """The same without what waits alone are asked: whether it is in the loop. Most operators wait
    for nothing, and stacks are deep."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_of_the_project(code.co_filename):
            return f"{code.co_filename.removeprefix(f'{_ROOT}/')}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _is_of_the_project(file: str) -> bool:
    return file.startswith(_PROJECT) and file != __file__
