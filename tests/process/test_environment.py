import pytest

from echelon.errors import WorldError
from echelon.process.environment import environment, first_host, timeout_wanted

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
BY_HAND = {name: TORCHRUN[name] for name in TORCHRUN if not name.startswith("TORCHELASTIC")}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1442971649",
    "PMIX_RANK": "0",
}
PALS = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")


def test_the_timeout_is_read_from_the_environment_and_nonsense_is_refused() -> None:
    assert timeout_wanted({}) is None
    assert timeout_wanted({"ECHELON_TIMEOUT": ""}) is None
    assert timeout_wanted({"ECHELON_TIMEOUT": "2.5"}) == 2.5
    for text in ("0", "-1", "nan", "inf", "10 s", "soon"):
        with pytest.raises(WorldError, match=f"ECHELON_TIMEOUT is '{text}': give the seconds"):
            timeout_wanted({"ECHELON_TIMEOUT": text})


def test_a_process_without_variables_is_alone() -> None:
    assert environment({"PATH": "/bin", "MASTER_ADDR": "left over"}) is None


def test_torchrun_variables_are_read() -> None:
    job = environment(TORCHRUN)
    assert job is not None
    assert (job.launcher, job.rank, job.size) == ("torchrun", 3, 4)
    assert (job.local_rank, job.local_size, job.one_host) == (1, 2, False)
    assert (job.master_addr, job.master_port) == ("node7", 29500)
    assert (job.agent_store, job.attempt) == (True, 2)


def test_one_rank_needs_no_master() -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    job = environment(env)
    assert job is not None
    assert (job.size, job.one_host, job.master_port) == (1, True, 0)


def test_slurm_variables_are_read_and_the_host_finds_its_number_of_tasks() -> None:
    job = environment(SLURM)
    assert job is not None
    assert (job.launcher, job.rank, job.size) == ("slurm", 5, 7)
    assert (job.local_rank, job.local_size, job.one_host) == (1, 2, False)
    assert job.master_addr == "gpu07"


def test_the_tasks_of_a_slurm_step_derive_one_port_and_other_steps_another() -> None:
    ports = [
        getattr(environment(SLURM | {"SLURM_PROCID": rank, "SLURM_STEP_ID": step}), "master_port")  # noqa: B009
        for rank, step in (("4", "0"), ("5", "0"), ("5", "1"))
    ]
    assert ports[0] == ports[1] != ports[2]
    assert 1024 < ports[0] < 32768


def test_slurm_on_one_host_needs_no_list_of_hosts() -> None:
    env = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "9",
    }
    job = environment(env)
    assert job is not None
    assert (job.one_host, job.master_addr) == (True, "127.0.0.1")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-12,15],cpu1", "gpu07"),
        ("rack[2,3]n[10-11]", "rack2n10"),
        ("a-b-[003]", "a-b-003"),
    ],
)
def test_the_first_host_of_a_slurm_list_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_torchrun_inside_slurm_wins_because_slurm_describes_the_agents() -> None:
    job = environment(SLURM | TORCHRUN)
    assert job is not None
    assert (job.launcher, job.rank) == ("torchrun", 3)


def test_variables_set_by_hand_may_repeat_what_slurm_says() -> None:
    same = BY_HAND | {"RANK": "5", "WORLD_SIZE": "7"}
    job = environment(SLURM | same)
    assert job is not None
    assert (job.rank, job.size) == (5, 7)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (BY_HAND | {"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        (BY_HAND | {"RANK": "-1"}, "RANK is -1 and WORLD_SIZE is 4"),
        (BY_HAND | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
        (BY_HAND | {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0: a job needs at least one rank"),
        (BY_HAND | {"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', which is not a whole number"),
        (BY_HAND | {"LOCAL_WORLD_SIZE": "8"}, "this host has 8 ranks and the whole job 4"),
        (BY_HAND | {"RANK": ""}, "RANK is not set, but .*WORLD_SIZE=4"),
        (BY_HAND | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000, which is not a port"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but WORLD_SIZE=2"),
        (BY_HAND | {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT is 'x'"),
        (SLURM | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID is 'x'"),
        (SLURM | {"SLURM_RESTART_COUNT": "1.5"}, "SLURM_RESTART_COUNT is '1.5'"),
        (SLURM | BY_HAND, "torchrun's variables say rank 3 of 4 and Slurm's say rank 5 of 7"),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID is 7 and SLURM_NTASKS is 7"),
        (SLURM | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID is 2"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "neither SLURM_STEP_NODELIST nor MASTER_ADDR"),
        (
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
            "SLURM_NTASKS_PER_NODE is not set",
        ),
    ],
)
def test_variables_that_are_missing_or_contradict_each_other_are_named(
    env: dict[str, str], sentence: str
) -> None:
    with pytest.raises(WorldError, match=sentence):
        environment(env)


def test_the_ranks_of_mpirun_on_one_host_derive_where_they_meet() -> None:
    ranks = [environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in (0, 1)]
    for rank, job in enumerate(ranks):
        assert job is not None
        assert (job.launcher, job.rank, job.size, job.one_host) == ("mpi", rank, 2, True)
        assert job.master_addr == "127.0.0.1"
        assert job.master_port == ranks[0].master_port  # type: ignore[union-attr]
    other = environment({**OPEN_MPI, "PMIX_NAMESPACE": "1442971650"})
    assert other is not None
    assert other.master_port != ranks[0].master_port  # type: ignore[union-attr]
    chosen = environment({**OPEN_MPI, "MASTER_PORT": "29500", "MASTER_ADDR": "node3"})
    assert chosen is not None
    assert (chosen.master_addr, chosen.master_port) == ("node3", 29500)


@pytest.mark.parametrize("local", [("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), PALS])
def test_mpich_intel_and_cray_are_read_and_their_port_is_asked_for(local: tuple[str, str]) -> None:
    env = {"PMI_RANK": "3", "PMI_SIZE": "4", local[0]: "1", local[1]: "4"}
    with pytest.raises(WorldError, match=r"MASTER_PORT is not set, and .* -genv MASTER_PORT 29500"):
        environment(env)
    job = environment({**env, "MASTER_PORT": "29500"})
    assert job is not None
    assert (job.rank, job.size, job.local_rank, job.local_size) == (3, 4, 1, 4)


def test_mpi_on_several_hosts_asks_for_the_host_of_rank_0() -> None:
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(WorldError, match=r"host of rank 0 is unknown.*mpirun -x MASTER_ADDR=HOST"):
        environment(env)
    job = environment({**env, "MASTER_ADDR": "node3"})
    assert job is not None
    assert (job.master_addr, job.one_host) == ("node3", False)


def test_one_rank_of_mpirun_is_alone_and_half_a_rank_is_refused() -> None:
    job = environment({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert job is not None
    assert (job.size, job.master_port) == (1, 0)
    with pytest.raises(WorldError, match="PMI_SIZE is not set, but PMI_RANK=0"):
        environment({"PMI_RANK": "0"})
    with pytest.raises(WorldError, match=r"PMIX_RANK=1 says which rank .* no variable how many"):
        environment({"PMIX_RANK": "1", "PMIX_NAMESPACE": "7"})


def test_mpi_wins_over_slurm_where_it_has_started_the_ranks() -> None:
    inside = {**SLURM, **OPEN_MPI}  # Slurm describes the daemons of mpirun
    assert environment(inside).launcher == "mpi"  # type: ignore[union-attr]
    srun = {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7", "PMIX_RANK": "5"}  # srun --mpi=...
    assert environment(srun).launcher == "slurm"  # type: ignore[union-attr]
    assert environment({**OPEN_MPI, **TORCHRUN}).launcher == "torchrun"  # type: ignore[union-attr]
    with pytest.raises(WorldError, match="say rank 3 of 4 and MPI's say rank 0 of 2"):
        environment({**OPEN_MPI, **BY_HAND})
