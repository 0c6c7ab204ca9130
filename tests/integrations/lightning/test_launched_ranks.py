"""Ranks come from a launcher; what contradicts it is said when the Trainer or Fabric is made."""

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning as L

import echelon as ec
import echelon.integrations.lightning

LAUNCHED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", [L.Fabric, L.Trainer])
def test_several_devices_without_a_launcher_name_the_command(host: type) -> None:
    with pytest.raises(ec.WorldError, match="start the script with `echelon run --ranks 2"):
        host(accelerator="cpu", devices=2, strategy="echelon_ddp")


@pytest.mark.parametrize("timeout", [30, timedelta(seconds=-1)])
def test_a_timeout_that_is_none_is_refused_when_a_strategy_is_made(timeout: Any) -> None:
    for strategy in ("EchelonStrategy", "EchelonFabricStrategy"):
        with pytest.raises(ec.ArgumentError, match=r"give a datetime\.timedelta"):
            getattr(echelon.integrations.lightning, strategy)("ddp", timeout=timeout)


@pytest.mark.parametrize("devices", ["auto", 2])
def test_devices_are_those_of_the_launcher(
    devices: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy="echelon_fsdp")
    assert (fabric.global_rank, fabric.world_size, str(fabric.device)) == (1, 2, "cpu")
    strategy: object = fabric.strategy
    assert isinstance(strategy, echelon.integrations.lightning.EchelonFabricStrategy)
    assert strategy.num_processes == 2
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    with pytest.raises(ec.ArgumentError, match="devices is 3, and 2 ranks were started"):
        L.Fabric(accelerator="cpu", devices=3, strategy="echelon_fsdp")


def test_the_names_are_those_of_both_registries() -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    for registry in (STRATEGY_REGISTRY, StrategyRegistry):
        assert {"echelon_ddp", "echelon_fsdp"} <= set(registry.available_strategies())
