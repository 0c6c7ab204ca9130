"""torch's agent for the ranks of one host: starts, watches, restarts and ends them.

``echelon run`` starts this module as a program; ``echelon run --print`` shows how.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from echelon.comm.torch_dist.engines import LOOPBACK
from echelon.comm.torch_dist.stores import MEMORY_STORE_VARIABLE, create_memory_store
from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.flight_recorder import VARIABLE, FlightRecorder, Phase
from echelon.diagnosis.stragglers import (
    ExitSign,
    ExitStage,
    StragglerRule,
    sign_of,
    straggler_error,
)
from echelon.errors import WorldError
from echelon.launch.attempt import Attempt
from echelon.launch.loopback_rendezvous import LoopbackRendezvous
from echelon.process import die_with_parent, time_limits
from echelon.process.process_status import ProcessStatus

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class _Ending:
    """The signal that ranks which still run get, if any, and the seconds until they are killed."""

    number: signal.Signals | None
    seconds: float


def _ending(
    codes: Mapping[int, int | None], stop: signal.Signals | None, grace: float
) -> _Ending | None:
    """What to do about ranks that have ended with ``codes`` or, where that is None, still run."""
    if stop is not None:
        return _Ending(stop, grace)
    if any(code not in (None, 0, os.EX_TEMPFAIL) for code in codes.values()):
        return _Ending(signal.SIGTERM, time_limits.END_S)
    if os.EX_TEMPFAIL in codes.values():
        return _Ending(None, grace)  # the others are about to leave, too
    return None


@final
class LocalAgent(LocalElasticAgent):
    """torch's agent, which can also be asked to stop a job so that it can go on later.

    It overrides one method that torch documents for it, ``_monitor_workers``. What differs:

    - A stop signal goes to the ranks alone and once, not to the processes that they have started:
      a rank fails when one that loads its data is ended. They get ``grace`` seconds.
    - A rank that leaves with 75 (``EX_TEMPFAIL``), asked or not, has not failed: the others get the
      same time, and none is started again.
    - When a rank fails, the others get 5 s and not 30. What ranks have started ends with them.

    Args:
        spec: of torch: what to run.
        logs: of torch: where the output of ranks goes.
        folder: where a line about each attempt goes.
        grace: seconds.
        recorder: into which ranks write where they are.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        folder: Path,
        grace: float,
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(spec, logs)
        self._recorder = recorder
        self.attempts: list[Attempt] = []
        self._folder, self._grace = folder, grace
        self._most = spec.max_restarts + 1
        self._stop: signal.Signals | None = None
        self._stop_s = 0.0  # when
        self._hurried = False
        self._open_attempt()

    def _open_attempt(self) -> None:
        self._ending: _Ending | None = None
        self._rule: StragglerRule | None = None
        self._deadline_s = 0.0
        self._hurrying = False
        self._signaled: tuple[int, ...] = ()
        self._killed: tuple[int, ...] = ()

    @property
    def stop(self) -> signal.Signals | None:
        """The signal that asked for an end, if one did."""
        return self._stop

    def request_stop(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: stop with time to save; after SIGQUIT, or Ctrl-C twice, very soon."""
        now, quits = time.monotonic(), number == signal.SIGQUIT
        presses = number == signal.SIGINT and self._stop is signal.SIGINT
        if quits or (presses and now - self._stop_s > time_limits.SAME_PRESS_S):
            self._hurried = True
        if self._stop is None:
            self._stop = signal.SIGTERM if quits else signal.Signals(number)
            self._stop_s = now

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the ranks are; torch's agent asks ten times a second."""
        ranks = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
        codes = {rank: _exit_code(pid) for rank, pid in ranks.items()}
        running = {rank: pid for rank, pid in ranks.items() if codes[rank] is None}
        self._tell_who_never_comes(codes)
        if running and not self._must_kill(codes, running) and not self._names_stragglers(codes):
            return RunResult(state=WorkerState.HEALTHY)
        if any(codes[rank] != 0 for rank in ranks):
            for pid in ranks.values():
                # Nobody has waited for it yet, so the number still means this group.
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        codes |= {rank: _await_exit(rank, pid) for rank, pid in running.items()}
        self._killed = tuple(running)
        result: RunResult = super()._monitor_workers(worker_group)
        self._close_attempt(
            {rank: code for rank, code in codes.items() if code is not None}, result
        )
        return result

    def _must_kill(self, codes: Mapping[int, int | None], running: Mapping[int, int]) -> bool:
        """Tell ranks to end when there is a reason; whether their time for that is over."""
        now = time.monotonic()
        if self._ending is None or self._ending.number is None:  # or it has been decided already
            ending = _ending(codes, self._stop, self._grace)
            if ending is not None and ending != self._ending:
                self._ending, self._deadline_s = ending, now + ending.seconds
                if ending.number is not None:
                    for pid in running.values():
                        os.kill(pid, ending.number)
                    self._signaled = tuple(running)
        if self._ending is None:
            return False
        if self._hurried and not self._hurrying:
            self._hurrying, self._deadline_s = (
                True,
                min(self._deadline_s, now + time_limits.HURRY_S),
            )
        # A stopped process is deaf, and where another one has failed there is nothing to save.
        deaf = self._stop is None and all(map(_is_stopped, running.values()))
        return now >= self._deadline_s or (deaf and self._signaled != ())

    def _tell_who_never_comes(self, codes: Mapping[int, int | None]) -> None:
        """Free ranks that start their world from waiting for one that has ended without it."""
        statuses = self._recorder.statuses(len(self.attempts))
        absent = [rank for rank, code in codes.items() if code == 0 and rank not in statuses]
        for rank, record in enumerate(self._recorder.rank_records if absent else ()):
            if rank in statuses and statuses[rank].phase is Phase.STARTING:
                record.set_absent_rank(absent[0])

    def _names_stragglers(self, codes: Mapping[int, int | None]) -> bool:
        """Whether ranks that still run do not follow the others; then leave records for them.

        A rank says so itself if it can; here are those that are stopped, or held by a call in C.
        """
        statuses = self._recorder.statuses(len(self.attempts))
        if not statuses or self._ending is not None:
            return False
        if self._rule is None:
            limit = max(status.timeout_s for status in statuses.values())
            self._rule = StragglerRule(limit + time_limits.SAY_SO_S)
        signs = {
            rank: ExitSign(stage=ExitStage.RUNNING)
            if code is None
            else ExitSign(stage=ExitStage.ENDED)
            for rank, code in codes.items()
        }
        signs |= {rank: sign_of(statuses[rank]) for rank in statuses if codes[rank] is None}
        late = self._rule.late(signs)
        if late:
            error = straggler_error(statuses, late)
            for folder in self._folder.glob(f"*/attempt_{len(self.attempts)}/{late[0]}"):
                FailureRecord.of(error, late[0]).write(folder / "error.json")
        return bool(late)

    def _close_attempt(self, codes: Mapping[int, int], result: RunResult) -> None:
        """Say how an attempt ended, and see that no other follows one that must be the last."""
        records = {
            rank: record
            for rank, failure in result.failures.items()
            if (record := FailureRecord.read(failure.error_file)) is not None
        }
        attempt = Attempt(
            number=len(self.attempts) + 1,
            most=self._most,
            codes=codes,
            signaled=self._signaled,
            killed=self._killed,
            raised=tuple(rank for rank, record in records.items() if not record.follows),
            noticed=tuple(rank for rank, record in records.items() if record.follows),
            stop=None if self._stop is None else self._stop.name,
            hurried=self._hurried,
            statuses=self._recorder.statuses(len(self.attempts)),
        )
        if not attempt.restarts:
            self._remaining_restarts = 0
        self.attempts.append(attempt)
        attempt.append(self._folder)
        text = ", ".join(f"{rank}: {code}" for rank, code in sorted(codes.items()))
        print(
            f"attempt {attempt.number} of {attempt.most}: {attempt.outcome.value} "
            f"(exit codes by rank: {text})",
            file=sys.stderr,
            flush=True,
        )
        self._open_attempt()


def _exit_code(pid: int) -> int | None:
    """How a child ended, negative for a signal; None while it runs. It is not waited for yet."""
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def _is_stopped(pid: int) -> bool:
    status = ProcessStatus.of(pid)
    return status is not None and status.stopped


def _await_exit(rank: int, pid: int) -> int:
    """How a killed rank ended."""
    end = time.monotonic() + time_limits.KILL_S
    while (code := _exit_code(pid)) is None:
        if time.monotonic() > end:
            raise WorldError(
                f"rank {rank} (process {pid}) was killed {time_limits.KILL_S:.0f} s ago and has "
                "not ended: the kernel waits for a device or a disk on its behalf, so look at "
                "those of this host"
            )
        time.sleep(0.01)
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m echelon.launch.agent",
        description="Run SCRIPT on ranks of this host, under torch's agent.",
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument(
        "--grace", type=float, default=time_limits.SAVE_S, help="seconds, after a stop signal"
    )
    parser.add_argument("--log-dir", type=Path, required=True, help="what ranks print goes here")
    parser.add_argument(
        "--live", action="store_true", help="but standard output of rank 0 does not"
    )
    parser.add_argument("--end-with", type=int, metavar="PID", help="the process that starts this")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of a job to their end; its exit code."""
    options = _options(arguments)
    files = dict.fromkeys(range(options.ranks), Std.ALL)
    if options.live:
        files[0] = Std.ERR
    # A rank starts as a program that has the kernel end it with this process, then becomes python.
    start = ("-I", "-S", die_with_parent.__file__, str(os.getpid()), sys.executable)
    spec = WorkerSpec(
        role="rank",
        local_world_size=options.ranks,
        rdzv_handler=LoopbackRendezvous(options.log_dir.name),
        entrypoint=sys.executable,
        args=(*start, "-u", *["-m"] * options.module, options.script, *options.arguments),
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr=LOOPBACK,
    )
    options.log_dir.mkdir(parents=True, exist_ok=True)
    logs = DefaultLogsSpecs(log_dir=str(options.log_dir), redirects=files)
    recorder = FlightRecorder.create(options.ranks)
    os.environ[VARIABLE] = recorder.path
    path, _store = create_memory_store()  # which lives as long as this process
    os.environ[MEMORY_STORE_VARIABLE] = f"{path} {options.log_dir.name}"
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that crashes shows its stack
    agent = LocalAgent(spec, logs, options.log_dir, options.grace, recorder)
    # torch's agent takes signals that are named here; this one must name some, and uses none.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it for SIGHUP
            signal.signal(number, agent.request_stop)
    # With this one the kernel says that the launcher was killed. It must be heard in the background
    # of a script, too, where a shell starts commands that ignore it.
    signal.signal(signal.SIGQUIT, agent.request_stop)
    if options.end_with is not None:
        die_with_parent.signal_on_death_of_parent(options.end_with, signal.SIGQUIT)
    if agent.stop is not None:
        return 128 + agent.stop  # before any rank has started
    agent.run()
    return agent.attempts[-1].exit_code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # to take torch down in good order would take longer than all the rest
