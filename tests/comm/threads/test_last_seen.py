"""What a report says of a simulated rank that does not come."""

from __future__ import annotations

import threading

from echelon.comm.threads.last_seen import LastSeen
from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall


def test_a_rank_that_runs_is_described_with_its_step_its_call_and_its_stack() -> None:
    seen = LastSeen(threading.get_ident(), threading.get_native_id())
    seen.note_step(7)
    place = CallSite("train.py", 3, "main")
    seen.call = CollectiveCall(CallSignature("barrier"), place, 0, "world", 2, blocking=True)
    stuck = seen.describe(2)
    assert (stuck.rank, stuck.where, stuck.call) == (2, "at step 7", str(seen.call))
    assert "test_last_seen.py" in "".join(stuck.stack)


def test_a_thread_that_has_ended_has_no_stack_although_another_has_its_identifier() -> None:
    seen = LastSeen()

    def run() -> None:
        seen.thread, seen.native_id = threading.get_ident(), threading.get_native_id()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    seen.thread = threading.get_ident()  # as Python may give it to the next thread
    assert not seen.is_alive()
    assert seen.describe(0).stack == []
