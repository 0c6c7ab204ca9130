from dataclasses import replace

import pytest

from echelon.planner.compute_time import Seconds, matmul_seconds, work_seconds
from echelon.planner.operations import Multiplication, RankWork
from tests.planner.sizes import DEVICE, RATES, STACK


def test_a_multiplication_by_hand() -> None:
    product = Multiplication(2048, 1024, 4096)
    flops = 2 * 2048 * 1024 * 4096
    nbytes = 2 * (2048 * 1024 + 1024 * 4096 + 2048 * 4096)
    assert matmul_seconds(product, DEVICE, STACK) == pytest.approx(flops / 200e12 + nbytes / 1e12)


def test_a_last_wave_of_one_tile_takes_as_long_as_a_full_one() -> None:
    stack = replace(STACK, rates=replace(RATES, waves=1.0, memory=1e9))
    one_wave = matmul_seconds(Multiplication(128 * 64, 64, 128), DEVICE, stack)
    one_more = matmul_seconds(Multiplication(128 * 65, 64, 128), DEVICE, stack)
    assert one_more == pytest.approx(2 * one_wave, rel=1e-3)


def test_a_host_that_is_slower_than_the_device_is_waited_for() -> None:
    stack = replace(STACK, rates=replace(RATES, launch_s=1e-3))
    work = RankWork(multiplications=(), attention_flops=1e11, moved=1e9, kernels=10)
    seconds = work_seconds(work, DEVICE, stack)
    assert seconds == pytest.approx(Seconds(0.0, 1e-3, 1e-3, 8e-3))
    assert seconds.total == pytest.approx(10e-3)
