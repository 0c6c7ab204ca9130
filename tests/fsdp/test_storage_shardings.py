"""A storage shows which elements of which parameters this rank has."""

import echelon as ec
from echelon.modules.sharded_tensor import sharding_of
from tests.parts import build


def test_parts_are_those_of_shard_info() -> None:
    def main(world: ec.World) -> None:
        for options in ({}, {"layout": "rows"}):
            model = ec.FSDP(build(), world.group, min_num_params=0, **options)
            for name, param in model.named_parameters():
                info = [(one.start, one.size) for one in model.shard_info(name)]
                assert list(sharding_of(param).ranges) == info
        model = ec.FSDP(build(), world.group, min_num_params=0, use_orig_params=False)
        (flat,) = model.parameters()
        assert sharding_of(flat).ranges == ((0, 10), (10, 10))
        assert flat.shape == (20,)

    ec.run(main, 2)
