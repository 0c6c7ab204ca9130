"""The device of this process while a program runs on it, and what was found."""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import cache, wraps
from threading import Lock
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils import backend_registration

from echelon.comm.streams import device_of
from echelon.comm.threads.process_state import register_generators
from echelon.errors import StateError
from echelon.process.replacement import Replacement
from echelon.testing.device import torch_module
from echelon.testing.device.clocks import Line, Memory, Operation, Point
from echelon.testing.device.collectives import register_backend
from echelon.testing.device.geometry import byte_ranges
from echelon.testing.device.native import device_library
from echelon.testing.device.races import Part, Races
from echelon.testing.device.report import Frame, RaceReport

Stack: TypeAlias = tuple[Frame, ...]
Costs: TypeAlias = Callable[[str, int], float]

_in_use = Lock()
# A thread of autograd drops a backward that is over when it gets the GIL, and would abort the
# process if that is at the end of the interpreter.
_LETS_GO_S = 0.02
_HOST = -1  # the line of the host, and the pool of its memory


class Order(Enum):
    """When work of streams runs."""

    EAGER = 0
    """When it is issued."""
    LAZY = 1
    """When somebody needs it: the most delayed order that is legal."""
    RANDOM = 2
    """Some of what may run runs, drawn from a seed."""


class _Kind(Enum):
    """Entries of the journal, as ``csrc/journal.h`` has them."""

    OPERATION, RECORD, WAIT, HOST_WAIT, HOST_LINE, HOST_ALL = range(6)
    ALLOCATE, FREE, OUTLIVES, FORGET = range(6, 10)


_OF_MEMORY = {_Kind.ALLOCATE, _Kind.FREE, _Kind.OUTLIVES}


@final
class SimulatedDevice:
    """What a program has asked of the device, and what races in it.

    Attributes:
        order: in which work of streams runs.
        waits: how often a stream or the host has waited for an event, by where, innermost frames
            first.
        host_waits: how often the host has waited for the device, also to read a value, likewise.
    """

    def __init__(self, order: Order, costs: Costs | None = None) -> None:
        self.order = order
        self.waits: Counter[Stack] = Counter()
        self.host_waits: Counter[Stack] = Counter()
        self._costs = costs
        self._library = device_library()
        self._looking = Lock()
        self._races = Races()
        self._host = Line("the host")
        self._lines = {0: Line("the default stream")}
        self._events: dict[int, Point] = {}
        self._memories: dict[int, Memory] = {}
        self._operations: dict[tuple[str, int, int], Operation] = {}
        self._stacks: dict[Operation, Stack] = {}
        self._frames: dict[int, Stack] = {}  # of stacks by their numbers

    def report(self) -> RaceReport:
        """The races among all that was asked of the device so far.

        What is still queued counts: a race is in what was issued, and not in when it ran.
        """
        self.look()
        return RaceReport(
            tuple(self._races.findings), self._stacks, tuple(self._races.still_used())
        )

    def look(self) -> None:
        """Take what was asked of the device since the last time into account.

        Called now and then, in any thread, it keeps the memory small that a long program takes.
        """
        with self._looking:
            for kind, *entry in self._library.journal():
                self._enter(_Kind(kind), *entry)

    def finished_at(self, stream: torch.Stream | None = None) -> float:
        """When the work of a stream that was issued so far is over, or all work, by the costs."""
        self.look()
        lines = self._lines.values() if stream is None else [self._line(stream.stream_id)]
        return max(line.time for line in lines)

    def digests(self) -> tuple[int, ...]:
        """What the host has copied from the device, each as a number, in the order of issue."""
        return tuple(self._library.digests())

    def _line(self, number: int) -> Line:
        if number == _HOST:
            return self._host
        if number not in self._lines:
            self._lines[number] = Line(self._library.name_of(number))
        return self._lines[number]

    def _enter(
        self,
        kind: _Kind,
        line: int,
        number: int,
        nbytes: int,
        stack: int,
        name: str,
        accesses: Sequence[tuple[int, int, int, tuple[int, ...], tuple[int, ...], bool]],
    ) -> None:
        if kind is _Kind.OPERATION:
            self._operate(self._line(line), self._operation(name, stack, line), accesses)
        elif kind in _OF_MEMORY:
            self._manage(kind, line, number, nbytes, stack)
        else:
            self._order(kind, line, number, self._stack(stack))

    def _order(self, kind: _Kind, line: int, number: int, stack: Stack) -> None:
        """An event, or a wait for one."""
        if kind in (_Kind.WAIT, _Kind.HOST_WAIT):
            self.waits[stack] += 1
        if kind in (_Kind.HOST_WAIT, _Kind.HOST_LINE, _Kind.HOST_ALL):
            self.host_waits[stack] += 1
        match kind:
            case _Kind.RECORD:
                self._events[number] = self._line(line).now()
            case _Kind.FORGET:
                self._events.pop(number, None)
            case _Kind.WAIT:
                self._wait(self._line(line), number)
            case _Kind.HOST_WAIT:
                self._wait(self._host, number)
            case _Kind.HOST_LINE:
                self._host.join(self._line(line).now())
            case _Kind.HOST_ALL:
                for each in self._lines.values():
                    self._host.join(each.now())

    def _manage(self, kind: _Kind, line: int, number: int, nbytes: int, stack: int) -> None:
        """What the allocator has done."""
        match kind:
            case _Kind.ALLOCATE:
                pool = None if line == _HOST else self._line(line)
                self._memories[number] = Memory(pool, nbytes)
                if pool is not None:
                    pool.join(self._host.now())
                    operation = self._operation("allocation", stack, line)
                    self._races.allocate(pool, operation)
                    everything = [(self._memories[number], ((0, nbytes),))]
                    self._launch(pool, operation, writes=everything)
            case _Kind.FREE:
                if (memory := self._memories.pop(number, None)) is not None:
                    self._races.free(memory)
            case _Kind.OUTLIVES:
                if number in self._memories:
                    self._memories[number].outlives(self._line(line))

    def _wait(self, line: Line, event: int) -> None:
        if event in self._events:  # else it is older than all that is known here
            line.join(self._events[event])

    def _operate(self, line: Line, operation: Operation, accesses: Sequence[Any]) -> None:
        parts: dict[bool, list[Part]] = {False: [], True: []}
        for number, offset, itemsize, sizes, strides, writes in accesses:
            if number in self._memories:
                ranges = byte_ranges(sizes, strides, itemsize)
                shifted = tuple((offset + start, offset + end) for start, end in ranges)
                parts[writes].append((self._memories[number], shifted))
        self._launch(line, operation, parts[False], parts[True])

    def _launch(
        self,
        line: Line,
        operation: Operation,
        reads: Sequence[Part] = (),
        writes: Sequence[Part] = (),
    ) -> None:
        if line is not self._host:
            line.join(self._host.now())  # it was launched after what the host has waited for
        cost = 0.0
        if self._costs is not None:
            written = sum(end - start for _, ranges in writes for start, end in ranges)
            cost = self._costs(operation.name, written)
        self._races.operate(operation, line, reads, writes, cost)

    def _operation(self, name: str, stack: int, line: int) -> Operation:
        key = name, stack, line
        if key not in self._operations:
            frames = self._stack(stack)
            users = (frame for frame in frames if frame.is_users)
            place = next(users, next((frame for frame in frames if not frame.is_ours), None))
            operation = Operation(
                name.removeprefix("aten::"),
                "an unknown place" if place is None else str(place),
                self._line(line).name,
            )
            self._operations[key] = operation
            self._stacks.setdefault(operation, frames)
        return self._operations[key]

    def _stack(self, number: int) -> Stack:
        if number not in self._frames:
            self._frames[number] = tuple(Frame(*frame) for frame in self._library.stack(number))
        return self._frames[number]


@contextmanager
def simulated_device(
    order: Order = Order.EAGER,
    seed: int = 0,
    *,
    without: Collection[Frame] = (),
    costs: Costs | None = None,
) -> Iterator[SimulatedDevice]:
    """Give this process a device, ``"sim"``, on which programs run in the body.

    If the process has run a backward before it has the device, backwards on it run on the thread
    that calls them, as autograd starts its threads of devices once.

    Args:
        order: when work of streams runs.
        seed: of ``Order.RANDOM``.
        without: lines of the program whose waits count as left out, to see whether they are
            needed. They are carried out, so the values stay right; the verdict is as without them.
        costs: how long an operation takes, by its name and the number of bytes that it writes. With
            them, ``device.finished_at`` says what overlaps.

    Raises:
        StateError: this process has one already, as in a body in the body.
        UnsupportedError: there is no compiler.

    Example:
        >>> with simulated_device() as device:  # doctest: +SKIP
        ...     side = torch.Stream("sim")
        ...     values = torch.zeros(4, device="sim")
        ...     with side:
        ...         values += 1
        ...     print(device.report())
    """
    has_own_thread = install()
    library = device_library()
    if not _in_use.acquire(blocking=False):
        raise StateError(
            "this process has a simulated device already, and there is one in a process: leave "
            "`with simulated_device()` before the next one"
        )
    with ExitStack() as stack:
        stack.callback(_in_use.release)
        library.begin(order.value, seed)
        library.journal()  # of what was done on the device before
        library.digests()
        library.drop({(frame.file, frame.line) for frame in without})
        for name in ("numpy", "tolist"):
            reader = Replacement(Tensor, name, _reading(name))
            reader.put_in()
            stack.callback(reader.take_out)
        library.watch(True)
        stack.callback(library.watch, False)
        stack.enter_context(torch.autograd.set_multithreading_enabled(has_own_thread))
        yield SimulatedDevice(order, costs)
        torch.accelerator.synchronize()  # what peers wait for, before the process may end


def _reading(name: str) -> Callable[..., Any]:
    """A method of tensors that gives the host their values without an operator."""
    plain = getattr(Tensor, name)

    @wraps(plain)
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.layout == torch.strided and device_of(tensor.device).is_host:
            device_library().host_reads(tensor)
        return plain(tensor, *args, **kwargs)

    return read


@cache
def install() -> bool:
    """Let torch know the device, for good; whether autograd has a thread for it."""
    device_library()
    backend_registration.rename_privateuse1_backend(torch_module.DEVICE)
    torch._register_device_module(torch_module.DEVICE, torch_module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    register_backend()
    register_generators(torch_module)
    atexit.register(time.sleep, _LETS_GO_S)
    leaf = torch.ones((), device=torch_module.DEVICE, requires_grad=True)
    try:
        leaf.backward()
    except RuntimeError:  # "0 <= device.index() && ...": its threads are of the devices before
        return False
    return True
