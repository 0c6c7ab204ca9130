"""Lightning: ``EchelonStrategy`` for the Trainer, ``EchelonFabricStrategy`` for Fabric.

Importing this package registers ``"echelon_ddp"`` and ``"echelon_fsdp"`` with both of them.

``launched_ranks``     ranks that a launcher has started, and small collectives among them
``checkpoint_folder``  a checkpoint of Lightning as a folder of steps
``lightning_file``     a checkpoint in one file, which Lightning itself has written
``trainer_strategy``   ``EchelonStrategy``
``fabric_strategy``    ``EchelonFabricStrategy``
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from echelon.integrations.lightning.fabric_strategy import EchelonFabricStrategy
from echelon.integrations.lightning.trainer_strategy import EchelonStrategy

__all__ = ["EchelonFabricStrategy", "EchelonStrategy"]

for _registry, _strategy in (
    (StrategyRegistry, EchelonStrategy),
    (STRATEGY_REGISTRY, EchelonFabricStrategy),
):
    for _plan in ("ddp", "fsdp"):
        _registry.register(
            f"echelon_{_plan}",
            _strategy,
            description=f"{_plan.upper()} of echelon, over shared memory on one host",
            plan=_plan,
        )
