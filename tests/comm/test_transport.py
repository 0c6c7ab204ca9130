"""What all groups do before a world carries out a call: they number it, note it, or refuse it."""

from collections.abc import Sequence

import pytest
import torch

from echelon.comm.primitives import Derived, Primitive
from echelon.comm.transport import Transport
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall
from echelon.errors import StateError


class NoTransport(Transport):
    """A transport that only notes calls."""

    def __init__(self) -> None:
        self.noted: list[CollectiveCall] = []
        super().__init__(
            "g",
            1,
            [4, 6, 8],
            torch.device("cpu"),
            5.0,
            shares_memory=False,
            note=self.noted.append,
        )

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work:
        raise AssertionError

    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int], device: torch.device | None
    ) -> "NoTransport | None":
        raise AssertionError

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        raise AssertionError

    def _use_timeout(self, seconds: float) -> None:
        raise AssertionError

    def number(self, op: str, *, label: object = None, is_message: bool = False) -> CollectiveCall:
        """As the methods of ``Group`` do it."""
        signature = CallSignature(op)._replace(label=label)
        return self._number(signature, blocking=True, is_message=is_message)


def test_collectives_and_messages_have_numbers_of_their_own_and_are_noted() -> None:
    group = NoTransport()
    group.number("barrier")
    group.number("send", is_message=True)
    group.number("all_reduce")
    group.number("recv", is_message=True)
    assert [(call.signature.op, call.position) for call in group.noted] == [
        ("barrier", 0),
        ("send", 0),
        ("all_reduce", 1),
        ("recv", 1),
    ]
    for call in group.noted:
        assert (call.group, call.rank) == ("g", 6)  # the rank in the job
        assert call.place.file == __file__


def test_a_group_of_a_forked_process_refuses_every_call() -> None:
    group = NoTransport()
    group.disown()
    with pytest.raises(StateError, match=r"barrier of group 'g' at .*which rank 6 has forked"):
        group.number("barrier")


def test_a_group_shows_its_kind_its_name_and_its_rank() -> None:
    assert repr(NoTransport()) == "NoTransport('g', rank 1 of 3, on cpu)"
