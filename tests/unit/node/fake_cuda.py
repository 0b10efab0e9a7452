"""A CUDA device that computes nothing: shapes, dtypes and devices are right, numbers are not there.

Tensors on it are torch's fake tensors, those on the CPU stay real. Operations on tensors of both
devices raise as CUDA would, and whatever would make the CPU wait for the device is noted, or raises
where it must not happen. What comes back from the device is ones.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, partialmethod
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_impls import has_meta, op_implementations_checks
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
NUMBERS_FROM_CPU = frozenset({aten.index.Tensor, aten.index_put_.default, aten.index_put.default})
"""Indexing takes its indices from the CPU, too, and brings them to the device by itself."""
STRICT = frozenset({aten.index_copy_.default, aten.index_select.default, aten.gather.default})
"""Whose index has to be where the numbers are, which fake tensors do not look at."""
LOOKED_AT = frozenset({
    *NUMBERS_FROM_CPU, *STRICT, aten._local_scalar_dense.default, aten.nonzero.default,
    aten.masked_select.default, aten._unique2.default, aten._grouped_mm.default,
})  # fmt: skip
"""Which may wait for the device, or not go on it, by more than where their tensors are."""
NEVER_WAITING = frozenset({
    aten.linear.default, aten.matmul.default, aten.rms_norm.default, aten.reshape.default,
    aten.layer_norm.default, aten.scaled_dot_product_attention.default, aten.softmax.int,
})  # fmt: skip
"""Made of other operations, none of which ever waits: there is no need to look at each."""

PAGE_LOCKED = "page_locked_by_the_fake"
"""Marks memory into which the device copies while the CPU goes on."""

FAST_GROUPS = frozenset({9, 10})
"""Major compute capabilities on which torch has a kernel for products by groups of rows; elsewhere
it reads on the CPU where the groups end (``aten/src/ATen/native/cuda/GroupedBlas.cpp``)."""


class Stalled(RuntimeError):
    """The CPU would have waited for the device, or a copy would have, where neither may."""


@dataclass(slots=True)
class FakeCuda:
    """What happened on the device."""

    waits: list[str] = field(default_factory=list)
    """Each time that the CPU waited for what the device was doing."""
    uploads: list[str] = field(default_factory=list)
    """Each copy from the CPU that waits for the device to take it."""
    forbidden: str = ""
    """While set, waiting raises :class:`Stalled`, with this in its message."""
    capability: tuple[int, int] = (8, 6)
    device: int = 0
    """The current one, of which streams and captures are."""
    streams: dict[int, "FakeStream"] = field(default_factory=dict)
    """The current one of each device."""
    capturing: "FakeStream | None" = None
    captures: list[object] = field(default_factory=list)
    """The pool of each graph that was made."""
    replays: int = 0

    def waited(self, what: str) -> None:
        self._refuse(what)
        self.waits.append(what)

    def uploaded(self, what: str, *, waits: bool) -> None:
        self._refuse(what)
        if waits:
            self.uploads.append(what)

    def ran_on(self, device: int | None) -> None:
        """An operation on a device: a capture of another one would not notice it."""
        if self.capturing is not None and self.capturing.device != device:
            raise Stalled(f"an operation on GPU {device} while GPU {self.device} is captured")

    def _refuse(self, what: str) -> None:
        if self.forbidden:
            raise Stalled(f"{what} {self.forbidden}")

    @contextmanager
    def forbidding(self, where: str) -> Iterator[None]:
        """Let waiting raise meanwhile."""
        before, self.forbidden = self.forbidden, where
        try:
            yield
        finally:
            self.forbidden = before

    def forget(self) -> None:
        """Start counting anew."""
        self.waits.clear()
        self.uploads.clear()


@dataclass(eq=False, slots=True)
class FakeStream:
    """Knows for whom it has waited."""

    device: int
    behind: list["FakeStream"] = field(default_factory=list)

    def wait_stream(self, other: "FakeStream") -> None:
        self.behind.append(other)


class FakeGraph:
    """Has a pool as soon as it was captured."""

    def __init__(self, seen: FakeCuda) -> None:
        self._seen = seen
        self.captured_in: object | None = None

    def pool(self) -> object:
        assert self.captured_in is not None
        return self.captured_in

    def replay(self) -> None:
        assert self.captured_in is not None
        self._seen.replays += 1


@dataclass(slots=True)
class _Api:
    """What of ``torch.cuda`` the engine calls."""

    seen: FakeCuda

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        before, self.seen.device = self.seen.device, device.index
        try:
            yield
        finally:
            self.seen.device = before

    def make_stream(self) -> FakeStream:
        return FakeStream(self.seen.device)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        at = self.seen.device if device is None else device.index
        return self.seen.streams.setdefault(at, FakeStream(at))

    def set_stream(self, stream: FakeStream) -> None:
        self.seen.streams[stream.device] = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    @contextmanager
    def graph(
        self, graph: FakeGraph, *, pool: object, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        """Like torch's: where something raises, the current stream is not put back."""
        assert capture_error_mode == "thread_local"
        self.set_stream(stream)
        self.seen.capturing = stream
        try:
            with self.seen.forbidding("while a stream is captured"):
                yield
        finally:
            self.seen.capturing = None
        graph.captured_in = pool or object()
        self.seen.captures.append(graph.captured_in)
        self.set_stream(FakeStream(stream.device))  # whoever needs his own has to set it

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self.seen.forbidden = "which is an error" if mode == "error" else ""

    def get_sync_debug_mode(self) -> int:
        return 2 if self.seen.forbidden else 0

    def names(self) -> dict[str, Any]:
        return {
            "_lazy_init": lambda: None,
            "device": self.use,
            "Stream": self.make_stream,
            "current_stream": self.current_stream,
            "set_stream": self.set_stream,
            "stream": self.stream,
            "CUDAGraph": partial(FakeGraph, self.seen),
            "graph": self.graph,
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "get_sync_debug_mode": self.get_sync_debug_mode,
            "get_device_capability": lambda _=None: self.seen.capability,
            "get_device_name": lambda _=None: "a GPU that is not there",
            "mem_get_info": lambda _=None: (8 << 30, 12 << 30),
            "is_available": lambda: True,
            "synchronize": lambda _=None: None,
            "empty_cache": lambda: None,
        }


@contextmanager
def fake_cuda(capability: tuple[int, int] = (8, 6)) -> Iterator[FakeCuda]:
    """Run with GPUs of that compute capability which are not there; name them with an index."""
    seen = FakeCuda(capability=capability)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(patch.multiple("torch.cuda", **_Api(seen).names()))
        stack.enter_context(patch.object(FakeTensor, "tolist", partialmethod(_listed, seen)))
        stack.enter_context(_Functions())
        stack.enter_context(_Operations(seen, fake))
        yield seen


def _is_cuda(value: Any) -> bool:
    if isinstance(value, FakeTensor):
        return value.device.type == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


class _Operations(TorchDispatchMode):
    """Whatever has to do with the device is faked; the rest computes."""

    def __init__(self, seen: FakeCuda, fake: FakeTensorMode) -> None:
        super().__init__()
        self._seen = seen
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if (kind := _kind(func)) and (device := _only_device(args, named)) is not None:
            self._seen.ran_on(device.index)
            if kind == "view":
                return self._viewed(device, func, args, named)
            return self._made_before(device, func, args, named)
        leaves = tree_leaves((args, named))
        if not any(map(_is_cuda, leaves)):
            return func(*args, **named)
        if (
            func.namespace == "aten" and func._can_decompose()
        ):  # as it comes here while inference_mode is on
            with self:
                return func.decompose(*args, **named)
        if func is aten._local_scalar_dense.default:
            self._seen.waited("a number is read")
            return torch.ones((), dtype=args[0].dtype).item()
        if func in (aten.nonzero.default, aten.masked_select.default, aten._unique2.default):
            self._seen.waited(f"{func} has a shape that depends on numbers")
        real = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]
        if func is aten._to_copy.default:
            if not isinstance(args[0], FakeTensor):
                waits = not named.get("non_blocking", False)
                self._seen.uploaded("a copy from the CPU", waits=waits)
                dtype = named.get("dtype") or args[0].dtype
                with self._fake:
                    return torch.empty(args[0].shape, dtype=dtype, device=named["device"])
            elif (device := named.get("device")) is not None and device.type == "cpu":
                self._seen.waited("rows are read")
                return torch.ones(args[0].shape, dtype=named.get("dtype") or args[0].dtype)
        elif func is aten.copy_.default and real:
            if real[0] is args[0]:
                in_background = len(args) > 2 and args[2] and hasattr(real[0], PAGE_LOCKED)
                if not in_background:
                    self._seen.waited("rows are read")
                return args[0].fill_(1)
            self._seen.uploaded("a copy from the CPU", waits=real[0].dim() > 0)
        elif func in NUMBERS_FROM_CPU:
            for index in args[1]:
                if isinstance(index, Tensor) and not isinstance(index, FakeTensor):
                    self._seen.uploaded("an index from the CPU", waits=True)
                elif index is not None and index.dtype is torch.bool:
                    self._seen.waited("a mask is counted")
        elif func in STRICT and real:
            raise RuntimeError(f"{func} of tensors on cuda:0 and cpu")
        elif "grouped_mm_fallback" in func.name() or (
            func is aten._grouped_mm.default and self._seen.capability[0] not in FAST_GROUPS
        ):
            self._seen.waited("where groups of rows end is read")
        with self._fake:
            out = func(*args, **named)
        for made in tree_leaves(out):
            if isinstance(made, FakeTensor):
                self._seen.ran_on(made.device.index)
        return out

    def _viewed(
        self, device: torch.device, func: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Do what ``FakeTensorMode`` comes to in the end, where there is nothing to consider."""
        with in_kernel_invocation_manager(self._fake):
            out = func(*args, **named)
        if isinstance(out, Tensor):
            return out if isinstance(out, FakeTensor) else FakeTensor(self._fake, out, device)
        return [FakeTensor(self._fake, part, device) for part in out]

    def _made_before(
        self, device: torch.device, func: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Find out once what comes of tensors of such shapes."""
        key = (func, device, *map(_described, args), *named, *map(_described, named.values()))
        if (known := _MADE.get(key)) is None:
            if func._can_decompose():
                with self:
                    out = func.decompose(*args, **named)
            else:
                with self._fake:
                    out = func(*args, **named)
            parts = (out,) if isinstance(out, Tensor) else tuple(out)
            layouts = [(part.shape, part.stride(), part.dtype, part.fake_device) for part in parts]
            _MADE[key] = (None if isinstance(out, Tensor) else type(out), layouts)
            return out
        several, layouts = known
        made = [
            FakeTensor(self._fake, torch.empty_strided(*layout, dtype=dtype, device="meta"), at)
            for *layout, dtype, at in layouts
        ]
        return made[0] if several is None else several(made)


_MADE: dict[Any, tuple[type | None, list[tuple[Any, ...]]]] = {}
"""Shape, strides, dtype and device of what operations gave, by what they were given."""


def _described(given: Any) -> Any:
    """All that what an operation gives depends on."""
    if isinstance(given, Tensor):
        return given.shape, given.stride(), given.dtype
    if isinstance(given, tuple | list):
        return tuple(map(_described, given))
    return type(given), given


@cache
def _kind(func: Any) -> str:
    """Say what comes of an operation: ``view``, ``new`` tensors, or what has to be looked at."""
    schema = func._schema
    if func in LOOKED_AT or func.namespace != "aten" or schema.is_mutable or not schema.returns:
        return ""
    if func not in NEVER_WAITING and func._can_decompose():
        return ""
    if any(str(result.type) not in {"Tensor", "List[Tensor]"} for result in schema.returns):
        return ""
    if not any(result.alias_info for result in schema.returns):
        return "new"
    special = any(matches(func) for matches, _ in op_implementations_checks)
    return "view" if (has_meta(func) and not special) or func is aten.reshape.default else ""


def _only_device(args: tuple[Any, ...], named: dict[str, Any]) -> torch.device | None:
    """The device where all tensors are, and that nothing names another; ``None`` off CUDA."""
    found: torch.device | None = None
    for given in chain(args, named.values()):
        for part in given if isinstance(given, tuple | list) else (given,):
            if isinstance(part, torch.device):
                return None
            if isinstance(part, Tensor):
                if not isinstance(part, FakeTensor):
                    return None
                if found is None:
                    found = part.fake_device
                elif found != part.fake_device:
                    return None
    return found if found is not None and found.type == "cuda" else None


class _Functions(TorchFunctionMode):
    """What torch does before its dispatcher is asked, and cannot do without CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self._instead: dict[Any, Callable[..., Any]] = {
            Tensor.__getitem__: _item,
            Tensor.__setitem__: _set_item,
            Tensor.__bool__: lambda tensor: bool(_number(tensor)),
            Tensor.__float__: lambda tensor: float(_number(tensor)),
            Tensor.__int__: lambda tensor: int(_number(tensor)),
            Tensor.__invert__: aten.bitwise_not.default,
            Tensor.contiguous: aten.contiguous.default,
            Tensor.copy_: aten.copy_.default,
            Tensor.nonzero: aten.nonzero.default,
            Tensor.numpy: _refuse_numpy,
        }
        self._made = frozenset({torch.tensor, torch.as_tensor})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        instead = self._instead.get(func)
        if func is torch.empty and (kwargs or {}).get("pin_memory"):
            named = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
            made = func(*args, **named)
            setattr(made, PAGE_LOCKED, True)
            return made
        if func in self._made and _is_cuda(device := (kwargs or {}).get("device")):
            named = {name: value for name, value in (kwargs or {}).items() if name != "device"}
            return func(*args, **named).to(device)
        if instead is not None and isinstance(args[0], FakeTensor):
            return instead(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _listed(tensor: Tensor, seen: FakeCuda) -> Any:
    if tensor.device.type == "cuda":
        seen.waited("a list is read")
    return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()


def _number(tensor: Tensor) -> Any:
    return aten._local_scalar_dense.default(tensor)


def _refuse_numpy(tensor: Tensor, **_: Any) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy")


def _item(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]`` by the operations that torch makes of it."""
    parts = index if isinstance(index, tuple) else (index,)
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    out, dim = tensor, 0
    indices: list[Tensor | None] = []
    for part in parts:
        if part is Ellipsis:
            skipped = tensor.dim() - taken
            dim += skipped
            indices += [None] * skipped
        elif part is None:
            out = aten.unsqueeze.default(out, dim)
            dim += 1
            indices.append(None)
        elif isinstance(part, slice):
            if part != slice(None):
                out = aten.slice.Tensor(out, dim, part.start, part.stop, part.step or 1)
            dim += 1
            indices.append(None)
        elif isinstance(part, int):
            out = aten.select.int(out, dim, part)
        else:
            assert isinstance(part, Tensor | list)
            indices.append(torch.tensor(part) if isinstance(part, list) else part)
            dim += 1
    if any(each is not None for each in indices):
        out = aten.index.Tensor(out, indices)
    return out


def _set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value``, likewise."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor | list) for part in parts):
        indices = [torch.tensor(part) if isinstance(part, list) else part for part in parts]
        assert all(isinstance(part, Tensor) for part in indices)
        if not isinstance(value, Tensor):
            if len(indices) == 1 and indices[0].dtype is torch.bool:  # so does torch
                mask = indices[0]
                mask = mask.view(*mask.shape, *[1] * (tensor.dim() - mask.dim()))
                aten.masked_fill_.Scalar(tensor, mask, value)
                return
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        aten.index_put_.default(tensor, indices, value)
        return
    part = _item(tensor, index)
    if isinstance(value, Tensor):
        aten.copy_.default(part, value)
    else:
        aten.fill_.Scalar(part, value)
