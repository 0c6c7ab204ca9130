"""Where the processes of a job listen."""

from pathlib import Path

import pytest

from tests.cli.sockets import exposed


@pytest.mark.slow
def test_no_process_of_a_job_on_one_host_listens_where_other_hosts_can_reach_it(
    tmp_path: Path,
) -> None:
    places, off_loopback = exposed(tmp_path, "gloo")
    assert off_loopback == []
    assert len(places) >= 3  # the store of the agent, and gloo's sockets
