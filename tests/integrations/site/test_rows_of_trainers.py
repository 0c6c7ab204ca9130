"""Every option of Accelerate and Lightning has its row in the pages for those who know them."""

from collections.abc import Callable
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from lightning.fabric import Fabric
from lightning.fabric import strategies as of_fabric
from lightning.pytorch import Trainer
from lightning.pytorch import strategies as of_trainer

from tests.pages.rows import FOLDER, names_in_rows, parameters_of, public_methods


@pytest.mark.parametrize(
    "callable_",
    [
        Accelerator,
        FullyShardedDataParallelPlugin,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        DataLoaderConfiguration,
        ParallelismConfig,
    ],
    ids=lambda item: item.__name__,
)
def test_every_parameter_of_accelerate_has_its_row(callable_: Callable[..., Any]) -> None:
    assert parameters_of(callable_) - names_in_rows(FOLDER / "accelerate.md") == set()


def test_every_method_of_accelerator_has_its_row() -> None:
    missing = public_methods(Accelerator) - names_in_rows(FOLDER / "accelerate.md")
    assert missing == set()


@pytest.mark.parametrize(
    "callable_",
    [
        Trainer,
        Fabric,
        of_trainer.DDPStrategy,
        of_trainer.FSDPStrategy,
        of_trainer.ModelParallelStrategy,
        of_fabric.DDPStrategy,
        of_fabric.FSDPStrategy,
        of_fabric.ModelParallelStrategy,
    ],
    ids=lambda item: f"{item.__module__}.{item.__name__}",
)
def test_every_parameter_of_lightning_has_its_row(callable_: Callable[..., Any]) -> None:
    assert parameters_of(callable_) - names_in_rows(FOLDER / "lightning.md") == set()


def test_every_method_of_fabric_has_its_row() -> None:
    assert public_methods(Fabric) - names_in_rows(FOLDER / "lightning.md") == set()
