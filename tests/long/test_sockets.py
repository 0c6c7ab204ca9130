from pathlib import Path

import pytest

from tests.cli.sockets import KINDS, exposed


@pytest.mark.parametrize("repetition", range(20))
@pytest.mark.parametrize("kind", KINDS)
def test_no_process_of_a_job_on_one_host_ever_listens_where_other_hosts_can_reach_it(
    kind: str, repetition: int, tmp_path: Path
) -> None:
    places, off_loopback = exposed(tmp_path, kind)
    assert off_loopback == []
    assert places
