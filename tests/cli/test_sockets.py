"""Where the processes of a job listen."""

from pathlib import Path

import pytest

from tests.cli.sockets import KINDS, exposed


@pytest.mark.parametrize("kind", KINDS)
def test_no_process_of_a_job_on_one_host_listens_where_other_hosts_can_reach_it(
    kind: str, tmp_path: Path
) -> None:
    places, off_loopback = exposed(tmp_path, kind)
    assert off_loopback == []
    # The store of the agent, and gloo's sockets.
    assert len(places) >= (1 if kind == "shm" else 3)
