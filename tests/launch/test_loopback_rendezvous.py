"""Each attempt of torch's agent has a store of its own in memory, and ranks a store on loopback."""

from datetime import timedelta

from torch.distributed import TCPStore

from echelon.launch.loopback_rendezvous import LoopbackRendezvous


def test_each_attempt_has_one_agent_an_empty_store_and_an_address_for_ranks() -> None:
    rendezvous = LoopbackRendezvous("job")
    first = rendezvous.next_rendezvous()
    first.store.set("key", "1")
    second = rendezvous.next_rendezvous()
    assert not second.store.check(["key"])
    assert [(info.rank, info.world_size) for info in (first, second)] == [(0, 1)] * 2
    address = second.bootstrap_store_info
    assert address.master_addr == "127.0.0.1"
    store = TCPStore(
        address.master_addr, address.master_port, is_master=False, timeout=timedelta(seconds=5)
    )
    store.set("a", "b")
    assert store.get("a") == b"b"
    assert (rendezvous.get_run_id(), rendezvous.get_backend()) == ("job", "loopback")
    assert rendezvous.use_agent_store
    assert (rendezvous.num_nodes_waiting(), rendezvous.is_closed()) == (0, False)
    rendezvous.set_closed()
    assert not rendezvous.is_closed()
    assert rendezvous.shutdown()
