"""What ranks send each other is data of known kinds, and never runs where it is received."""

import os
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.buffers import from_bytes
from echelon.comm.object_bytes import from_object
from tests.bomb import Bomb
from tests.worlds import KINDS, run_world


def error_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except ec.EchelonError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def object_calls(world: ec.World, folder: str) -> dict[str, Any]:
    group, rank = world.group, world.rank
    bomb = Bomb(os.path.join(folder, "ran"))
    kinds = {"rank": rank, "set": {1, 2.5}, (1, "x"): [None, b"\0", 3j], "nan": float("nan")}
    tensors = OrderedDict(x=torch.arange(3.0) * rank, i=torch.tensor(7), c=torch.tensor([1j]))
    found: dict[str, Any] = {
        "kinds": str(group.all_gather_object(kinds)),
        "tensors": group.all_gather_object(tensors),
        "refused": error_of(group.all_gather_object, {"a": [bomb]}),
        "refused src": error_of(group.broadcast_object, bomb, 0) if rank == 0 else "",
        "by name": error_of(group.all_gather_object, 1, pickle="yes"),
    }
    # As a rank would that somebody else has taken: the bytes of a pickle where an object is due.
    data = from_bytes(pickle.dumps(bomb)) if rank == 1 else from_object("fine", "the object")
    length, lengths = torch.tensor([data.numel()]), torch.zeros(world.size, dtype=torch.int64)
    if rank == 1:
        group.all_gather_single(lengths, length, True, label="lengths of objects").wait()
        parts = [data.new_empty(n) for n in lengths.tolist()]
        group.all_gather(parts, data, True, label="objects").wait()
    else:
        found["bomb"] = error_of(group.all_gather_object, "fine")
    found["ran"] = os.path.exists(bomb.path)
    # And with a length that no memory can hold.
    if rank == 1:
        huge = torch.tensor([1 << 60])
        group.all_gather_single(lengths, huge, True, label="lengths of objects").wait()
    else:
        found["huge"] = error_of(group.all_gather_object, "fine")
    found["pickled"] = str(group.all_gather_object(defaultdict(int, a=rank), pickle=True))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_data_and_a_pickle_is_taken_only_where_the_call_asks_for_it(
    kind: str, tmp_path: Path
) -> None:
    found = run_world(kind, object_calls, 2, (str(tmp_path),))
    for rank, seen in enumerate(found):
        assert seen["kinds"] == str(
            [
                {"rank": r, "set": {1, 2.5}, (1, "x"): [None, b"\0", 3j], "nan": float("nan")}
                for r in range(2)
            ]
        )
        for r, tensors in enumerate(seen["tensors"]):
            assert torch.equal(tensors["x"], torch.arange(3.0) * r)
            assert tensors["i"].item() == 7
            assert tensors["c"].dtype == torch.complex64
        assert seen["refused"].startswith("ArgumentError: the object.a[0] is a tests.bomb.")
        assert "with pickle=True in this call" in seen["refused"]
        assert seen["by name"].startswith("ArgumentError: pickle is 'yes'")
        assert not seen["ran"]
        assert seen["pickled"].count("defaultdict") == 2, rank
    assert found[0]["refused src"].startswith("ArgumentError: the object is a tests.bomb.")
    assert found[0]["bomb"].startswith("CommError: rank 1 sent what is no object")
    assert found[0]["huge"].startswith("CommError: rank 1 says that it sends an object of 11529215")


LOADS, LOAD = pickle.loads, pickle.load  # simulated ranks put theirs in the same place


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_checked_sent_and_saved_unpickles_nothing(kind: str) -> None:
    assert run_world(kind, train_without_pickle, 2) == [0, 0]


def train_without_pickle(world: ec.World) -> int:
    """Every technique once, with a reader of pickles that counts."""
    calls = []

    def counted_loads(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return LOADS(*args, **options)

    def counted_load(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return LOAD(*args, **options)

    pickle.loads, pickle.load = counted_loads, counted_load
    try:
        torch.manual_seed(0)
        x = torch.randn(4, 8) + world.rank
        ddp = ec.DDP(torch.nn.Linear(8, 8), world.group)
        fsdp = ec.FSDP(torch.nn.Sequential(torch.nn.Linear(8, 8)), world.group)
        for model in (ddp, fsdp):
            optimizer = torch.optim.AdamW(model.parameters())
            model(x).square().mean().backward()
            optimizer.step()
        stages = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
        pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=lambda y, _: y.mean())
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(x, target=x)
        optimizer.step()
        pipe.state_dict()
        pipe.optimizer_state_dict(optimizer)
    finally:
        pickle.loads, pickle.load = LOADS, LOAD
    return len(calls)
