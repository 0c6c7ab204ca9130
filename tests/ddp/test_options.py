"""Options that cannot be carried out are refused before anything is done."""

import math

import pytest
import torch

from echelon.ddp.options import DDPOptions
from echelon.errors import ArgumentError

GOOD = {
    "bucket_bytes": 100,
    "first_bucket_bytes": 10,
    "sync": "overlap",
    "broadcast_buffers": True,
    "init": "broadcast",
    "gradient_dtype": None,
    "reduction": "mean",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_bytes", -1),
        ("bucket_bytes", 1.5),
        ("bucket_bytes", True),
        ("first_bucket_bytes", -1),
        ("sync", "auto"),
        ("broadcast_buffers", "yes"),
        ("init", "copy"),
        ("gradient_dtype", torch.int32),
        ("gradient_dtype", "bfloat16"),
        ("reduction", "max"),
        ("reduction", 0),
        ("reduction", -2.0),
        ("reduction", math.inf),
        ("reduction", math.nan),
        ("reduction", True),
        ("reduction", None),
    ],
)
def test_a_bad_option_is_refused_and_named(name, value):
    with pytest.raises(ArgumentError, match=rf"^{name} is "):
        DDPOptions(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("reduction", "divisor"), [("mean", 3), ("sum", 1.0), (2.5, 2.5), (4, 4.0)]
)
def test_a_reduction_is_a_divisor_of_the_sum(reduction, divisor):
    assert DDPOptions(**{**GOOD, "reduction": reduction}).divisor(3) == divisor


def test_complex_gradients_travel_in_their_own_dtype():
    options = DDPOptions(**{**GOOD, "gradient_dtype": torch.bfloat16})
    assert options.wire_dtype(torch.float32) is torch.bfloat16
    assert options.wire_dtype(torch.complex64) is torch.complex64
