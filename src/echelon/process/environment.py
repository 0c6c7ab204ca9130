"""Which job this process belongs to, read from the variables of torchrun, Slurm or MPI. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from echelon.errors import WorldError

_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Rank, size, rank on the host, ranks of the host: of Open MPI, of Hydra (MPICH and Intel MPI), and
# of PALS (Cray).
_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # another text in each job
_HOW = (
    "Start the script with torchrun, srun, mpirun or echelon run, or unset these variables to run "
    "it alone."
)
# Below Linux's range of ephemeral ports, so that no outgoing connection holds the port by chance.
_FIRST_PORT, _NUM_PORTS = 12_000, 18_000


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Where this process stands in its job.

    Attributes:
        launcher: ``"torchrun"``, ``"slurm"`` or ``"mpi"``: whose variables were read.
        rank: this process in the job.
        size: number of processes in the job.
        local_rank: this process among those of its host.
        local_size: number of processes on this host.
        master_addr: host that holds the store; empty if the job has one process and needs none.
        master_port: its port; 0 if there is none.
        agent_store: whether torchrun's agent already holds the store.
        attempt: how often the launcher has restarted the job.
        private_store: path of the store that ``echelon run`` holds for this host; empty for others.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False
    attempt: int = 0
    private_store: str = ""

    @property
    def one_host(self) -> bool:
        """Whether all processes of the job are on this host."""
        return self.local_size == self.size


def environment(env: Mapping[str, str]) -> JobEnvironment | None:
    """The job that ``env`` describes, or None if it describes none and this process is alone.

    torchrun's own variables (it sets ``TORCHELASTIC_RUN_ID``) win over all others, because these
    then describe torchrun's agents, and MPI's win over Slurm's for the same reason. Others may be
    set together if they say the same.

    Raises:
        WorldError: a variable is missing or no number, or two of them contradict each other.

    Example:
        >>> env = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2",
        ...        "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "n[3-4]"}
        >>> environment(env).master_addr
        'n3'
    """
    torch_job = _torchrun(env) if any(env.get(name) for name in _TORCH[:4]) else None
    if torch_job is not None and "TORCHELASTIC_RUN_ID" in env:
        return torch_job
    other = _mpi(env) or (_slurm(env) if env.get("SLURM_PROCID") else None)
    if torch_job is not None and other is not None:
        _compare(torch_job, other, env)
    return torch_job or other


def timeout_wanted(env: Mapping[str, str]) -> float | None:
    """The seconds of ``ECHELON_TIMEOUT``, or None where it is not set.

    Raises:
        WorldError: it is no number, or none that is more than 0.

    Example:
        >>> timeout_wanted({"ECHELON_TIMEOUT": "10"})
        10.0
    """
    text = env.get("ECHELON_TIMEOUT", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise WorldError(
            f"ECHELON_TIMEOUT is {text!r}: give the seconds that a rank waits for others in one "
            "call, a number more than 0, or unset it"
        )
    return seconds


def _compare(torch_job: JobEnvironment, other: JobEnvironment, env: Mapping[str, str]) -> None:
    if (torch_job.rank, torch_job.size) != (other.rank, other.size):
        whose = {"slurm": "Slurm's", "mpi": "MPI's"}[other.launcher]
        names = ["SLURM_PROCID", "SLURM_NTASKS", *(name for names in _MPI for name in names[:2])]
        raise WorldError(
            f"torchrun's variables say rank {torch_job.rank} of {torch_job.size} and {whose} say "
            f"rank {other.rank} of {other.size} "
            f"({_shown(env, 'RANK', 'WORLD_SIZE', *dict.fromkeys(names))}). "
            "Unset RANK and WORLD_SIZE, or start the script with torchrun."
        )


def _torchrun(env: Mapping[str, str]) -> JobEnvironment:
    rank, local_rank, size, local_size = (_number(env, name, _TORCH) for name in _TORCH[:4])
    job = JobEnvironment(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=env.get("MASTER_ADDR", ""),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_count(env, "TORCHELASTIC_RESTART_COUNT"),
        private_store=_private_store(env),
    )
    _check_ranks(env, job, ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), _TORCH[:4])
    if size == 1:
        return job
    if not job.master_addr:
        raise WorldError(f"MASTER_ADDR is not set, but {_shown(env, *_TORCH)}. {_HOW}")
    return replace(job, master_port=_port(env, _number(env, "MASTER_PORT", _TORCH)))


def _private_store(env: Mapping[str, str]) -> str:
    """The path of the store of ``echelon run``; empty in another job that a rank has started."""
    path, _, run_id = env.get("ECHELON_STORE", "").partition(" ")
    return path if run_id == env.get("TORCHELASTIC_RUN_ID") else ""


def _mpi(env: Mapping[str, str]) -> JobEnvironment | None:
    """The job of mpirun or mpiexec; None where neither has started this process."""
    by_rank = [names for names in _MPI if env.get(names[0])]
    # Slurm sets PMI_RANK, too, and PMIx PMIX_RANK; then it has variables of its own for the rest.
    full = [names for names in by_rank if all(map(env.get, names))]
    if not full and env.get("SLURM_PROCID"):
        return None
    if not by_rank:
        if env.get("PMIX_RANK"):
            raise WorldError(
                f"PMIX_RANK={env['PMIX_RANK']} says which rank this process is, and no variable "
                f"how many there are. {_HOW}"
            )
        return None
    names = (full or by_rank)[0]
    rank, size, local_rank, local_size = (_number(env, name, names) for name in names)
    job = JobEnvironment(
        launcher="mpi",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=env.get("MASTER_ADDR", ""),
    )
    _check_ranks(env, job, names[:2], names[2:], names)
    if size == 1:
        return job
    if not job.master_addr and not job.one_host:
        raise WorldError(
            "the host of rank 0 is unknown: MPI does not name it, and MASTER_ADDR is not set "
            f"({_shown(env, *names)}). Set it for all ranks: mpirun -x MASTER_ADDR=HOST with "
            "Open MPI, mpiexec -genv MASTER_ADDR HOST with others."
        )
    return replace(job, master_addr=job.master_addr or "127.0.0.1", master_port=_mpi_port(env))


def _mpi_port(env: Mapping[str, str]) -> int:
    """MASTER_PORT, or a port that all ranks of the job derive alike and other jobs do not."""
    if env.get("MASTER_PORT"):
        return _port(env, _number(env, "MASTER_PORT", ("MASTER_PORT",)))
    job = next((env[name] for name in _MPI_JOB if env.get(name)), None)
    if job is None:
        raise WorldError(
            "MASTER_PORT is not set, and this MPI does not name the job from which ranks would "
            "derive a port. Set it to one free port for all ranks: mpiexec -genv MASTER_PORT 29500."
        )
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _slurm(env: Mapping[str, str]) -> JobEnvironment:
    tasks = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    names = ("SLURM_PROCID", "SLURM_LOCALID", tasks, "SLURM_NTASKS_PER_NODE")
    rank, local_rank, size = (_number(env, name, names) for name in names[:3])
    job = JobEnvironment(
        launcher="slurm",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=_slurm_local_size(env, size, names),
        master_addr=env.get("MASTER_ADDR", ""),
        attempt=_count(env, "SLURM_RESTART_COUNT"),
    )
    _check_ranks(env, job, ("SLURM_PROCID", tasks), names[1::2], names)
    if size == 1:
        return job
    master_addr = job.master_addr or _slurm_master(env, job)
    if not master_addr:
        raise WorldError(
            "the host of rank 0 is unknown: neither SLURM_STEP_NODELIST nor MASTER_ADDR is set "
            f"({_shown(env, *names)}). Start the script with srun, or set MASTER_ADDR."
        )
    return replace(job, master_addr=master_addr, master_port=_slurm_port(env, names))


def _slurm_master(env: Mapping[str, str], job: JobEnvironment) -> str:
    """The first host of the step, or of the job; empty if that is not known."""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    hosts = hosts or env.get("SLURM_NODELIST", "")
    return first_host(hosts) if hosts else "127.0.0.1" if job.one_host else ""


def _slurm_port(env: Mapping[str, str], shown: tuple[str, ...]) -> int:
    """MASTER_PORT, or a port that all tasks of the step derive alike and other steps do not."""
    if env.get("MASTER_PORT"):
        return _port(env, _number(env, "MASTER_PORT", shown))
    job = "SLURM_JOB_ID" if env.get("SLURM_JOB_ID") else "SLURM_JOBID"
    number = _number(env, job, (*shown, "MASTER_PORT"))
    step = _count(env, "SLURM_STEP_ID")
    return _FIRST_PORT + (number * 31 + step) % _NUM_PORTS


def _slurm_local_size(env: Mapping[str, str], size: int, shown: tuple[str, ...]) -> int:
    """Tasks on this host: from a list such as ``2(x3),1``, or the same number on every host."""
    counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if counts and env.get("SLURM_NODEID"):
        per_host = list(_expand_counts(counts))
        host = _number(env, "SLURM_NODEID", shown)
        if sum(per_host) == size and host < len(per_host):
            return per_host[host]
    if env.get("SLURM_NTASKS_PER_NODE"):
        return min(size, _number(env, "SLURM_NTASKS_PER_NODE", shown))
    num_hosts = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES")
    if num_hosts == "1" or size == 1:
        return size
    return _number(env, "SLURM_NTASKS_PER_NODE", shown)


def _expand_counts(counts: str) -> Iterator[int]:
    """``2(x3),1`` is 2, 2, 2, 1."""
    for item in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise WorldError(f"SLURM_STEP_TASKS_PER_NODE is {counts!r}, which is no list of counts")
        yield from [int(match[1])] * int(match[2] or 1)


def first_host(hosts: str) -> str:
    """The first host of a Slurm list.

    Example:
        >>> first_host("gpu[07-12,15],cpu1")
        'gpu07'
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts.strip())
    if first is None:
        raise WorldError(f"Slurm's list of hosts {hosts!r} names no host: set MASTER_ADDR")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _number(env: Mapping[str, str], name: str, shown: tuple[str, ...]) -> int:
    text = env.get(name, "")
    if not text.strip():
        raise WorldError(f"{name} is not set, but {_shown(env, *shown)}. {_HOW}")
    if not re.fullmatch(r"\s*-?\d+\s*", text):
        raise WorldError(f"{name} is {text!r}, which is not a whole number. {_HOW}")
    return int(text)


def _count(env: Mapping[str, str], name: str) -> int:
    """A variable that is 0 where it is not set."""
    return _number(env, name, (name,)) if env.get(name, "").strip() else 0


def _port(env: Mapping[str, str], port: int) -> int:
    if not 0 < port < 2**16:
        raise WorldError(
            f"MASTER_PORT is {port}, which is not a port (need 0 < port < {2**16}): "
            f"all ranks need the same free port of {env.get('MASTER_ADDR')!r}"
        )
    return port


def _check_ranks(
    env: Mapping[str, str],
    job: JobEnvironment,
    names: tuple[str, ...],
    local_names: tuple[str, ...],
    shown: tuple[str, ...],
) -> None:
    """Refuse ranks and sizes that contradict each other; ``names`` are the variables of both."""
    for (rank_name, size_name), rank, size in (
        (names, job.rank, job.size),
        (local_names, job.local_rank, job.local_size),
    ):
        if size < 1:
            raise WorldError(f"{size_name} is {size}: a job needs at least one rank. {_HOW}")
        if not 0 <= rank < size:
            raise WorldError(
                f"{rank_name} is {rank} and {size_name} is {env.get(size_name, size)} "
                f"(need 0 <= {rank_name} < {size_name}). {_HOW}"
            )
    if job.local_size > job.size:
        raise WorldError(
            f"this host has {job.local_size} ranks and the whole job {job.size} "
            f"({_shown(env, *shown)}). {_HOW}"
        )


def _shown(env: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)
