"""What torch asks of the module of a device: ``torch.sim``, as ``torch.cuda`` is that of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from echelon.testing.device.native import device_library

DEVICE = "sim"

_PRIVATE_USE = 20  # of c10::DeviceType
_TOTAL_MEMORY = 80 << 30  # what a program may plan with; none of it is reserved

Stream = partial(torch.Stream, device=DEVICE)
Event = partial(torch.Event, DEVICE)


def current_stream(device: Any = None) -> torch.Stream:
    """The stream on which work is issued."""
    return torch.accelerator.current_stream()


def set_stream(stream: torch.Stream) -> None:
    """Issue what follows on a stream."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Issue work of the body on a stream."""
    if stream is None:
        yield
        return
    with stream:
        yield


def default_stream(device: Any = None) -> torch.Stream:
    """The stream that is current in a new thread."""
    return torch.Stream(stream_id=0, device_index=current_device(), device_type=_PRIVATE_USE)


def synchronize(device: Any = None) -> None:
    """Wait for all streams."""
    torch.accelerator.synchronize()


class device:
    """Make a device current in the body: there is one."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def device_count() -> int:
    """Of the host: as many as it has ranks, of which each has one."""
    return int(device_library().device_count())


def is_available() -> bool:
    """Yes."""
    return True


def is_initialized() -> bool:
    """Yes."""
    return True


def current_device() -> int:
    """That of the local rank."""
    return int(device_library().device_index())


def set_device(device: Any) -> None:
    """Accept any: each process has one, which is the one of its rank."""


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """Seed the generator of the device; ``torch.manual_seed`` calls it."""
    generator().manual_seed(seed)


manual_seed = manual_seed_all


def generator() -> torch.Generator:
    """The default generator of the device."""
    made: torch.Generator = device_library().generator()
    return made


def seed() -> None:
    """Seed the generator of the device from chance."""
    generator().seed()


seed_all = seed


def initial_seed() -> int:
    """What the generator of the device was seeded with."""
    return generator().initial_seed()


def get_rng_state(device: Any = DEVICE) -> Tensor:
    """The state of the default generator: 16 bytes."""
    return generator().get_state()


def get_rng_state_all() -> list[Tensor]:
    """The state of the default generator of each device: there is one."""
    return [get_rng_state()]


def set_rng_state(new_state: Tensor, device: Any = DEVICE) -> None:
    """Restore the state of the default generator."""
    generator().set_state(new_state)


def set_rng_state_all(new_states: list[Tensor]) -> None:
    """Restore the state of the default generator."""
    set_rng_state(new_states[0])


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What ``torch.autocast("sim")`` takes."""
    return [torch.float16, torch.bfloat16]


def max_memory_allocated(device: Any = None) -> int:
    """The peak of ``memory_allocated`` in bytes."""
    return int(device_library().memory()[1])


def memory_allocated(device: Any = None) -> int:
    """The bytes of tensors on the device."""
    return int(device_library().memory()[0])


max_memory_reserved, memory_reserved = max_memory_allocated, memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """The bytes that are free, and all."""
    return _TOTAL_MEMORY - memory_allocated(), _TOTAL_MEMORY


def memory_stats(device: Any = None) -> dict[str, int]:
    """The statistics that are kept."""
    return {
        "allocated_bytes.all.current": memory_allocated(),
        "allocated_bytes.all.peak": max_memory_allocated(),
    }


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin a new peak."""
    device_library().reset_peak()


def empty_cache() -> None:
    """Keep what is free: it belongs to no other program."""


def ipc_collect() -> None:
    """Nothing: no memory is shared with another process."""


def get_device_name(device: Any = None) -> str:
    """For reports."""
    return "simulated device"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """That of the oldest GPU with all dtypes that are computed here."""
    return 8, 0


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """What programs ask for most."""
    major, minor = get_device_capability()
    return SimpleNamespace(
        name=get_device_name(),
        major=major,
        minor=minor,
        total_memory=_TOTAL_MEMORY,
        multi_processor_count=1,
    )


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """No: there is one."""
    return False
