"""What ranks of most tests need: the server that they fork from imports it once for all of them.

An optimizer and a hook that the compiler must not see import ``torch._dynamo``, which takes longer
than most tests.
"""

import pytest
import torch._dynamo
import torch.distributed
import torch.testing
import torch.utils.checkpoint

import echelon.checkpoint.api
import echelon.ddp.api
import echelon.fsdp.api
import echelon.world.processes
import echelon.world.torch_dist.agent
import tests.worlds

__all__ = ["echelon", "pytest", "tests", "torch"]
