"""Gives the tests of this folder their devices and cases."""

import pytest
import torch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append(pytest.param("cuda", marks=pytest.mark.cuda))
    metafunc.parametrize("device", devices)
    if "case" in metafunc.fixturenames:
        cases = metafunc.module.CASES
        metafunc.parametrize("case", list(cases.values()), ids=list(cases))
