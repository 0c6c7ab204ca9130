"""What a call is: how it reads, how ranks compare it, and where in user code it was made."""

import concurrent.futures
import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import echelon as ec
from echelon.diagnosis.collective_call import CallSignature, CallSite, caller, fingerprint

CALL = CallSignature("reduce", torch.float32, (2, 3), "sum", 1, "layer.weight")


def test_a_call_reads_like_what_was_written() -> None:
    assert str(CALL) == "reduce(sum) float32[2, 3] root=1 of 'layer.weight'"
    assert str(CallSignature("barrier")) == "barrier"
    assert str(CallSignature("broadcast", torch.bool, (), None, 0)) == "broadcast bool[] root=0"


@pytest.mark.parametrize(
    "other",
    [
        CALL._replace(op="all_reduce"),
        CALL._replace(dtype=torch.float64),
        CALL._replace(dtype=torch.int32),
        CALL._replace(shape=(3, 2)),
        CALL._replace(shape=(6,)),
        CALL._replace(reduce="max"),
        CALL._replace(root=0),
        CALL._replace(label="layer.bias"),
        CALL._replace(label=None),
        CALL._replace(dtype=None),
    ],
)
def test_every_difference_changes_the_fingerprint(other) -> None:
    assert fingerprint(other) != fingerprint(CALL)
    assert fingerprint(CALL._replace()) == fingerprint(CALL)


def fingerprint_here(world: ec.World) -> int:
    return fingerprint(CALL)


def test_the_members_of_a_subgroup_are_part_of_the_call() -> None:
    assert (
        str(CallSignature("subgroup", None, (0, 2), label="world.1"))
        == "subgroup [0, 2] of 'world.1'"
    )
    assert fingerprint(CallSignature("subgroup", None, (0, 2))) != fingerprint(
        CallSignature("subgroup", None, (0, 1))
    )


def test_the_fingerprint_has_64_bits_and_is_the_same_in_another_process() -> None:
    assert 0 <= fingerprint(CALL) < 2**64
    assert ec.run(fingerprint_here, ranks=1, world="processes") == [fingerprint(CALL)]


def test_a_call_knows_its_bytes() -> None:
    assert CALL.nbytes == 24
    assert CallSignature("broadcast", torch.float64).nbytes == 8  # no dims: one element
    assert CallSignature("all_reduce", torch.bfloat16, (4, 0)).nbytes == 0
    assert CallSignature("barrier").nbytes == 0


def test_the_caller_is_the_line_of_user_code() -> None:
    def user_function() -> CallSite:
        return caller()

    place = user_function()
    assert (place.file, place.function) == (__file__, "user_function")
    assert str(place) == f"{__file__}:{place.line} in user_function"


def test_the_caller_tells_which_exception_it_handles() -> None:
    try:
        raise ValueError
    except ValueError:
        place = caller()
    assert str(place).endswith(f":{place.line} in {place.function} (while handling ValueError)")


def test_frames_of_torch_are_not_the_users() -> None:
    found: list[CallSite] = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_post_accumulate_grad_hook(lambda grad: found.append(caller()))
    with torch.autograd.set_multithreading_enabled(False):
        (tensor * 2).sum().backward()
    assert [place.file for place in found] == [__file__]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_wrapper_of_a_function_that_torch_has_renamed_is_not_the_users() -> None:
    def main(world: ec.World) -> None:
        dist.init_process_group("gloo")
        part = torch.ones(1 + world.rank)
        dist.all_gather_into_tensor(part.repeat(2), part)

    with pytest.raises(ec.CollectiveMismatch) as info:
        ec.run(main, 2)
    assert all(f"{__file__}:" in call for call in info.value.calls.values()), info.value


class Calls:
    """Communicates where Python's own modules call it."""

    def __init__(self, world: ec.World) -> None:
        self.world = world

    @contextlib.contextmanager
    def summed(self, tensor: torch.Tensor) -> Iterator[None]:
        yield
        self.world.group.all_reduce(tensor)


def place_of_a_mismatch(world: ec.World, how: str) -> None:
    """Ranks that differ in a call, which a thread of Python's pool or an exit stack makes."""
    tensor = torch.ones(2 + world.rank)
    if how == "pool":
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(world.group.all_reduce, tensor).result()
    else:
        with contextlib.ExitStack() as stack:
            stack.callback(world.group.all_reduce, tensor)


def test_the_place_of_a_call_is_a_line_of_the_user_where_python_makes_it() -> None:
    with pytest.raises(ec.CollectiveMismatch) as info:
        ec.run(place_of_a_mismatch, 2, args=("stack",))
    assert all(f"{__file__}:" in call for call in info.value.calls.values()), info.value


def test_the_place_of_a_call_of_a_pool_is_not_a_line_of_pythons_threads() -> None:
    with pytest.raises(ec.CollectiveMismatch) as info:
        ec.run(place_of_a_mismatch, 2, args=("pool",))
    assert not [call for call in info.value.calls.values() if "_bootstrap" in call], info.value


def test_the_place_of_a_line_is_one_object_and_another_line_has_another() -> None:
    def places() -> list[CallSite]:
        return [caller(), caller()]

    (first, second), (again, _) = places(), places()
    assert first is again
    assert first == second  # two calls of one line
    assert caller() != first


def test_codes_that_follow_each_other_at_one_address_have_places_of_their_own() -> None:
    for number in range(50):
        space: dict[str, object] = {"caller": caller}
        exec(compile("place = caller()", f"script-{number}.py", "exec"), space)
        place = space["place"]
        assert isinstance(place, CallSite)
        assert place.file == f"script-{number}.py"
