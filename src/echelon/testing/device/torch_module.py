"""What torch asks of the module of a device: ``torch.sim``, as ``torch.cuda`` is that of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.testing.device.native import device_library

DEVICE = "sim"

_PRIVATE_USE = 20  # of c10::DeviceType

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


def get_rng_state(device: Any = DEVICE) -> Tensor:
    """The state of the default generator: 16 bytes."""
    return generator().get_state()


def set_rng_state(new_state: Tensor, device: Any = DEVICE) -> None:
    """Restore the state of the default generator."""
    generator().set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    """The state of the default generator."""
    return [get_rng_state()]


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


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin a new peak."""
    device_library().reset_peak()


def empty_cache() -> None:
    """Keep what is free: it belongs to no other program."""
