"""The CPU as a device with streams: torch and the groups of echelon under a ``Detector``.

Operators are seen by a ``TorchDispatchMode``, also those of backward; devices by an entry of
``streams.kinds``; collectives by the ``_start`` of groups. What runs, runs at once.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.comm import streams
from echelon.comm.derived import Reduce
from echelon.comm.group import Group
from echelon.comm.lone.group import LoneGroup
from echelon.comm.primitives import (
    AllGather,
    AllReduce,
    Broadcast,
    Exchange,
    Receive,
    ReduceScatter,
    Send,
)
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.work import CompletedWork, Work
from echelon.modules.sharded_tensor import local_shard
from echelon.testing.device.clocks import Line, Memory, Point
from echelon.testing.device.geometry import byte_ranges
from echelon.testing.device.races import Part
from tests.device.detector import Detector, place_of_call

aten = torch.ops.aten
_COPIES = {aten.copy_, aten._to_copy, aten._foreach_copy_}
_NO_VALUES = {  # operators that look at the shape of their argument only
    aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones,
    aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like,
    aten.randn_like, aten.is_same_size,
}  # fmt: skip
_is_gone: Callable[[int], bool] = torch.UntypedStorage._expired  # by the address of a storage
_here = threading.local()


def _ranges_of(tensor: Tensor) -> list[tuple[int, int]]:
    """The bytes of a tensor in its storage."""
    start = tensor.storage_offset() * tensor.itemsize
    ranges = byte_ranges(tuple(tensor.shape), tensor.stride(), tensor.itemsize)
    return [(start + first, start + last) for first, last in ranges]


@final
class PlayedStorages:
    """The memories of storages, and which are on the host."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._known: dict[int, tuple[StorageWeakRef, Memory]] = {}

    def sweep(self) -> None:
        """Free what nobody refers to any more; called before any clock moves."""
        for key in [key for key in list(self._known) if _is_gone(key)]:
            known = self._known.pop(key, None)
            if known is not None:  # nor has another thread seen it
                self._detector.free(known[1])

    def add(self, tensor: Tensor, pool: Line | None, *, on_host: bool = False) -> Memory:
        """A new allocation."""
        storage = tensor.untyped_storage()
        memory = Memory(pool, storage.nbytes(), on_host=on_host)
        if pool is not None:
            self._detector.allocate(pool)
        self._known[storage._cdata] = StorageWeakRef(storage), memory
        return memory

    def resize(self, storage: torch.UntypedStorage, pool: Line) -> None:
        """Memory that was given back, or allocated again."""
        before = self._known.pop(storage._cdata, None)
        if before is not None and before[1].nbytes:
            self._detector.free(before[1])
        memory = Memory(pool, storage.nbytes())
        self._known[storage._cdata] = StorageWeakRef(storage), memory
        if memory.nbytes:
            self._detector.allocate(pool)
            self._detector.operate("allocation", pool, writes=[(memory, [(0, memory.nbytes)])])

    def of(self, tensor: Tensor) -> Memory:
        """The memory of a tensor; where one comes from that was not seen before is not known."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is None or _is_gone(known[0].cdata):
            return self.add(tensor, None, on_host=self._detector.is_beside)
        return known[1]

    def part(self, tensor: Tensor) -> Part:
        """The bytes of a tensor."""
        return self.of(tensor), _ranges_of(tensor)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor was seen before."""
        return tensor.untyped_storage()._cdata in self._known


@final
class Played(TorchDispatchMode):
    """Shows a detector what the operators of this thread read and write."""

    def __init__(self, detector: Detector, storages: PlayedStorages | None = None) -> None:
        super().__init__()
        self.detector = detector
        self.storages = PlayedStorages(detector) if storages is None else storages
        self.is_muted = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_muted or _is_view(func):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            self.storages.sweep()
            reads, writes = _arguments(func, args, kwargs)
            # An argument that was never seen is older than all that is watched.
            parts = [self.storages.part(tensor) for tensor in (*reads, *writes)]
            result = func(*args, **kwargs)
            line = self._line_of(func, [*reads, *writes], parts)
            self._note(func, kwargs, args, parts, len(reads), result, line)
            return result

    def _line_of(self, func: Any, tensors: list[Tensor], parts: list[Part]) -> Line:
        """Where an operator runs: of single numbers in another memory, it gets a copy."""
        detector, host, device = self.detector, [], []
        for tensor, (memory, _) in zip(tensors, parts, strict=True):
            (host if memory.on_host else device).append(tensor)
        if not host and not device:
            return detector.host if detector.is_beside else detector.current
        if not host or (func.overloadpacket in _COPIES and device):
            return detector.current
        if not device:
            return detector.host
        if not any(tensor.dim() for tensor in host):
            return detector.current
        parts[:] = [(m, ranges if m.on_host else []) for m, ranges in self._copy_to_host(parts)]
        if any(tensor.numel() > 1 for tensor in device):
            detector.mixed[place_of_call()] += 1
        return detector.host

    def _copy_to_host(self, parts: list[Part]) -> list[Part]:
        """Let the host wait for what of ``parts`` is not there."""
        current = self.detector.current
        on_device = [(memory, ranges) for memory, ranges in parts if not memory.on_host]
        self.detector.operate("copy to the host", current, on_device)
        self.detector.read_on_host(current.now())
        return parts

    def _note(
        self,
        func: Any,
        kwargs: Any,
        args: Any,
        parts: list[Part],
        num_read: int,
        result: Any,
        line: Line,
    ) -> None:
        detector, storages = self.detector, self.storages
        on_host = [memory.on_host for memory, _ in parts]
        made = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and not storages.is_known(leaf)
        ]
        runs_on_host = line is detector.host
        written = [*parts[num_read:]]
        for tensor in made:
            if not storages.is_known(tensor):
                pool = None if runs_on_host else line
                memory = storages.add(tensor, pool, on_host=runs_on_host)
                written.append((memory, [(0, memory.nbytes)]))
        detector.operate(func._schema.name.removeprefix("aten::"), line, parts[:num_read], written)
        if runs_on_host:
            return
        is_copy = func.overloadpacket in _COPIES and any(on_host)
        if is_copy and not _is_non_blocking(args, kwargs):
            detector.wait_on_host(line.now())
        elif parts and _gives_numbers(result):  # and not `can_cast`, which reads no tensor
            detector.read_on_host(line.now())

    def read(self, tensor: Tensor) -> None:
        """The host reads a tensor past the dispatcher."""
        with torch._C.DisableTorchFunctionSubclass():
            self.storages.sweep()
            memory, ranges = self.storages.part(tensor)
            if memory.on_host:
                self.detector.operate("read", self.detector.host, [(memory, ranges)])
                return
            self._copy_to_host([(memory, ranges)])


@cache
def _is_view(func: Any) -> bool:
    returned = [ret.alias_info for ret in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned) or (
        func.overloadpacket in (aten._unsafe_view, aten.detach, aten.lift_fresh)
    )


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    overwrites = func.overloadpacket in _COPIES or "out" in kwargs
    for i, (name, is_written) in enumerate(_schema_of(func)):
        value = args[i] if i < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            tensors = [value]
        elif isinstance(value, list | tuple):
            tensors = [leaf for leaf in value if isinstance(leaf, Tensor)]
        else:
            continue
        if is_written:
            writes += tensors
            if not overwrites:
                reads += tensors
        elif func.overloadpacket not in _NO_VALUES:
            reads += tensors
    return reads, writes


@cache
def _schema_of(func: Any) -> list[tuple[str, bool]]:
    """By argument of an operator, its name and whether it is written."""
    arguments = func._schema.arguments
    return [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in arguments]


def _is_non_blocking(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", len(args) > 2 and args[2] is True))


def _gives_numbers(result: Any) -> bool:
    leaves = tree_leaves(result)
    return any(isinstance(leaf, bool | int | float | complex) for leaf in leaves)


# Devices -----------------------------------------------------------------------------------------


@final
class PlayedEvent(streams.StreamEvent):
    """A point of a line."""

    def __init__(self, played: Played, point: Point) -> None:
        self._played, self._point = played, point

    def wait(self) -> None:
        self._played.storages.sweep()
        self._played.detector.wait(self._played.detector.current, self._point)

    def synchronize(self) -> None:
        self._played.storages.sweep()
        self._played.detector.wait_on_host(self._point)

    def query(self) -> bool:
        return False  # a device may always be late


@final
class PlayedStream(streams.Stream):
    """A line, or the one that is current."""

    def __init__(self, played: Played, line: Line | None) -> None:
        self._played, self._line = played, line
        self.queued = line is not None

    @contextmanager
    def _in_body(self) -> Iterator[None]:
        self._played.storages.sweep()
        assert self._line is not None
        with self._played.detector.as_current(self._line):
            yield
            self._played.storages.sweep()

    @contextmanager
    def _nothing(self) -> Iterator[None]:
        yield

    def as_current(self) -> AbstractContextManager[object]:
        return self._nothing() if self._line is None else self._in_body()

    def wait_for_current(self) -> None:
        if self._line is not None:
            self._played.storages.sweep()
            self._played.detector.wait(self._line, self._played.detector.current.now())

    def record_event(self) -> streams.StreamEvent:
        self._played.storages.sweep()
        line = self._played.detector.current if self._line is None else self._line
        return PlayedEvent(self._played, line.now())


class PlayedDevice(streams.PlainDevice):
    """The CPU as a device that has memory and streams of its own."""

    def __init__(self, played: Played, device: torch.device) -> None:
        super().__init__(device)
        self.is_host = self.adds_in_order = False
        self.reading_waits = True
        self._played = played

    def current_stream(self) -> streams.Stream:
        return PlayedStream(self._played, None)

    def side_stream(self) -> streams.Stream:
        return PlayedStream(self._played, self._played.detector.new_stream())

    def synchronize(self) -> None:
        self._played.storages.sweep()
        detector = self._played.detector
        for line in detector.all_streams():
            detector.wait_on_host(line.now())

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        with _muted(self._played):
            memory = torch.empty(numel, dtype=dtype)
        self._played.storages.sweep()
        self._played.storages.add(memory, None, on_host=True)
        return memory

    def is_on_host(self, tensor: Tensor) -> bool:
        return self._played.storages.of(local_shard(tensor)).on_host

    def resize(self, memory: torch.UntypedStorage, nbytes: int) -> None:
        self._played.storages.sweep()
        memory.resize_(nbytes)
        self._played.storages.resize(memory, self._played.detector.current)

    def copy_from_host(self, tensor: Tensor, *, always: bool) -> Tensor:
        if not self.is_on_host(tensor):
            return tensor.clone() if always else tensor
        with _muted(self._played):
            copy = tensor.clone()
        detector, storages = self._played.detector, self._played.storages
        storages.sweep()
        memory = storages.add(copy, detector.current)
        parts = [storages.part(tensor)], [(memory, [(0, memory.nbytes)])]
        detector.operate("copy from the host", detector.current, *parts)
        return copy


@contextmanager
def _muted(played: Played) -> Iterator[None]:
    before, played.is_muted = played.is_muted, True
    try:
        yield
    finally:
        played.is_muted = before


# Groups ------------------------------------------------------------------------------------------


@final
class Mail:
    """What messages between the watched ranks of a job tell of their clocks."""

    def __init__(self) -> None:
        self._points: dict[object, deque[Point]] = {}
        self._lock = threading.Lock()

    def put(self, key: object, point: Point) -> None:
        """A message was sent after ``point``."""
        with self._lock:
            self._points.setdefault(key, deque()).append(point)

    def take(self, key: object) -> Point:
        """The point of the next message, which has come."""
        with self._lock:
            return self._points[key].popleft()


@final
class PlayedWork(Work):
    """The wait of the current stream for an operation on the line of a communicator."""

    def __init__(self, inner: Work, played: Played, line: Line, mail: object | None) -> None:
        super().__init__(inner.call)
        self._inner, self._played, self._line, self._mail = inner, played, line, mail
        self._point = line.now()

    def done(self) -> bool:
        return self._inner.done()

    def _wait(self, timeout: float | None) -> None:
        with _muted(self._played):
            self._inner.wait(timeout)
        self._played.storages.sweep()
        detector = self._played.detector
        if self._mail is not None:
            detector.current.join(_mail.take(self._mail))
            self._mail = None
        detector.wait(detector.current, self._point)


_mail = Mail()
_ends: weakref.WeakKeyDictionary[threading.Thread, Point] = weakref.WeakKeyDictionary()
_of_host: weakref.WeakSet[Group] = weakref.WeakSet()  # groups whose tensors are on the host


def _tensors_of(operation: Any, rank: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What an operation of a communicator reads, and what it writes."""
    match operation:
        case AllReduce(tensor=tensor):
            return [tensor], [tensor]
        case ReduceScatter(output=output, input=input):
            return [input], [output]
        case AllGather(outputs=outputs, input=input):
            return [input], outputs
        case Broadcast(tensor=tensor, src=src):
            return ([tensor], []) if src == rank else ([], [tensor])
        case Exchange(outputs=outputs, inputs=inputs):
            return inputs, outputs
        case Send(tensor=tensor):
            return [tensor], []
        case Receive(tensor=tensor):
            return [], [tensor]
        case Reduce(tensor=tensor, dst=dst):
            return [tensor], [tensor] if dst == rank else []
        case _:
            return [], []


def _watched(start: Callable[..., Work]) -> Callable[..., Work]:
    """``_start`` of a group, whose operations are on the line of its communicator."""

    def watched(group: Any, call: Any, operation: Any) -> Work:
        played: Played | None = getattr(_here, "played", None)
        if played is None or played.is_muted or group in _of_host:
            return start(group, call, operation)
        played.storages.sweep()
        detector, peer = played.detector, _peer(operation)
        ends = None if peer is None else tuple(sorted((group.rank, peer)))
        line = detector.communicator(group.name if ends is None else (group.name, *ends))
        line.join(detector.current.now())
        reads, writes = (
            map(played.storages.part, each) for each in _tensors_of(operation, group.rank)
        )
        detector.operate(call.signature.op, line, list(reads), list(writes))
        mail = None
        if isinstance(operation, Send):
            _mail.put((group.thread_world, group.name, group.rank, peer, operation.tag), line.now())
        elif isinstance(operation, Receive):
            mail = (group.thread_world, group.name, peer, group.rank, operation.tag)
        with _muted(played):
            inner = start(group, call, operation)
        return PlayedWork(inner or CompletedWork(call), played, line, mail)

    return watched


def _peer(operation: Any) -> int | None:
    if isinstance(operation, Send):
        return operation.dst
    return operation.src if isinstance(operation, Receive) else None


# All together ------------------------------------------------------------------------------------


def _device(device: torch.device) -> streams.DeviceKind:
    played: Played | None = getattr(_here, "played", None)
    return streams.PlainDevice(device) if played is None else PlayedDevice(played, device)


def _making_subgroups(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``Group.subgroup``, which remembers the groups that were asked for on the host."""

    def subgroup(group: Group, ranks: Sequence[int], **options: Any) -> Group | None:
        made: Group | None = plain(group, ranks, **options)
        if made is not None and options.get("device") == "cpu":
            _of_host.add(made)
        return made

    return subgroup


def _reading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gives the host values past the dispatcher."""

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        played: Played | None = getattr(_here, "played", None)
        if played is not None and not played.is_muted:
            played.read(local_shard(tensor))
        return plain(tensor, *args, **kwargs)

    return read


def _starting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``Thread.start``, whose thread is watched like the one that starts it."""

    def start(thread: threading.Thread) -> None:
        played: Played | None = getattr(_here, "played", None)
        if played is not None:
            run, begin = thread.run, played.detector.host.now()
            thread.run = lambda: _run_watched(thread, played, begin, run)  # type: ignore[method-assign]
        plain(thread)

    return start


def _joining(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``Thread.join``, after which what the thread has done is done."""

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        plain(thread, timeout)
        played: Played | None = getattr(_here, "played", None)
        if played is not None and thread in _ends:
            played.detector.host.join(_ends[thread])

    return join


def _run_watched(
    thread: threading.Thread, played: Played, begin: Point, run: Callable[[], None]
) -> None:
    played.detector.begin_thread(begin)
    _here.played = Played(played.detector, played.storages)
    try:
        with _here.played:
            run()
    finally:
        del _here.played
        _ends[thread] = played.detector.end_thread()


@contextmanager
def played_devices() -> Iterator[None]:
    """Inside, the CPU of each thread that is ``watched`` is a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streams.kinds, "cpu", _device)
        for group in (LoneGroup, ThreadGroup):
            patch.setattr(group, "_start", _watched(group._start))
        patch.setattr(Group, "subgroup", _making_subgroups(Group.subgroup))
        for method in ("tolist", "numpy"):
            patch.setattr(Tensor, method, _reading(getattr(Tensor, method)))
        patch.setattr(threading.Thread, "start", _starting(threading.Thread.start))
        patch.setattr(threading.Thread, "join", _joining(threading.Thread.join))
        yield


@contextmanager
def watched(detector: Detector) -> Iterator[Detector]:
    """Watch this thread in the body, inside of ``played_devices``."""
    detector.begin()
    played = Played(detector)
    _here.played = played
    try:
        with played:
            yield detector
        played.storages.sweep()
    finally:
        del _here.played
