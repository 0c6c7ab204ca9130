"""A simulated accelerator: GPU races found on a CPU, in anybody's program.

``clocks``     happens-before: what does its work in order, and which accesses race
``races``      what is in which memory, and which accesses of it were found to race
``geometry``   the bytes that a tensor covers in its storage
``native``     the device itself, in C++ (``csrc/``), compiled once for each version of torch
``simulated``  the device of this process while a program runs on it, and its report
``report``     two operations without an order, told to a person
``torch_module``  ``torch.sim``: what a device module of torch has
``collectives``   process groups whose collectives run on streams of their own, over gloo
``cuda_names``    ``"cuda"`` in a script means the simulated device
``raced_script``  a rank of ``echelon race``
``__main__``    compiles the device now
``pytest_fixture``  a device for a test, which fails if something races
"""

from echelon.testing.device.cuda_names import served_cuda
from echelon.testing.device.report import RaceReport
from echelon.testing.device.simulated import Order, SimulatedDevice, simulated_device

__all__ = ["Order", "RaceReport", "SimulatedDevice", "served_cuda", "simulated_device"]
