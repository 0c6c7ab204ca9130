"""The variables that a rank finds."""

from echelon.c10d.rank_variables import rank_variables
from echelon.process.environment import environment


def test_our_own_reader_of_torchruns_variables_understands_them() -> None:
    job = environment(rank_variables(2, 3, 29_500))
    assert job is not None
    assert (job.rank, job.size, job.local_rank, job.one_host) == (2, 3, 2, True)
