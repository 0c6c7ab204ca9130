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
from dataclasses import dataclass, replace
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
from echelon.diagnosis.held_up import verdict
from echelon.diagnosis.stuck_ranks import (
    ExitSign,
    ExitStage,
    StuckRankRule,
    seconds_to_follow,
    sign_of,
    stuck_rank_error,
)
from echelon.errors import WorldError
from echelon.errors.message_text import say
from echelon.launch import rank_program
from echelon.launch.attempt import FILE, STOP_SIGNALS, Attempt
from echelon.launch.loopback_rendezvous import LoopbackRendezvous
from echelon.process import die_with_parent, time_limits
from echelon.process.lossy_streams import lose_rather_than_raise
from echelon.process.process_status import ProcessStatus


@dataclass(frozen=True, slots=True)
class _StopRequest:
    """What asked the agent to stop the job.

    Attributes:
        number: the signal that the ranks are to get.
        time_s: when, on the monotonic clock.
        is_urgent: whether ranks get less time to save than they were promised.
    """

    number: signal.Signals
    time_s: float
    is_urgent: bool


@dataclass(frozen=True, slots=True)
class _StopPlan:
    """The signal that ranks which still run get, if any, and the seconds until they are killed."""

    number: signal.Signals | None
    seconds: float


def _plan_stop(
    codes: Mapping[int, int | None], request: _StopRequest | None, grace: float
) -> _StopPlan | None:
    """Whether and how to stop ranks, whose exit codes are None while they run."""
    if request is not None:
        return _StopPlan(request.number, grace)
    if any(code not in (None, 0, os.EX_TEMPFAIL) for code in codes.values()):
        return _StopPlan(signal.SIGTERM, time_limits.END_S)
    if os.EX_TEMPFAIL in codes.values():
        return _StopPlan(None, grace)  # the others are about to leave, too
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
        folder: where the output of ranks goes.
        file: where a line about each attempt goes.
        grace: seconds.
        recorder: into which ranks write where they are.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        folder: Path,
        file: Path,
        grace: float,
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(spec, logs)
        self._recorder = recorder
        self.attempts: list[Attempt] = []
        self._folder, self._file, self._grace = folder, file, grace
        self._max_attempts = spec.max_restarts + 1
        self._request: _StopRequest | None = None
        self._open_attempt()

    def _open_attempt(self) -> None:
        self._plan: _StopPlan | None = None
        self._rule: StuckRankRule | None = None
        self._deadline_s = 0.0
        self._deadline_is_urgent = False
        self._signaled: tuple[int, ...] = ()
        self._killed: tuple[int, ...] = ()

    @property
    def stop(self) -> signal.Signals | None:
        """The signal that asked the job to stop; None: nothing has."""
        return None if self._request is None else self._request.number

    def request_stop(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: stop with time to save; after SIGQUIT, or Ctrl-C twice, very soon."""
        now, is_quit, request = time.monotonic(), number == signal.SIGQUIT, self._request
        if request is None:
            stop = signal.SIGTERM if is_quit else signal.Signals(number)
            self._request = _StopRequest(stop, now, is_urgent=is_quit)
            return
        is_same_key = number == signal.SIGINT and request.number is signal.SIGINT
        if is_quit or (is_same_key and now - request.time_s > time_limits.SAME_PRESS_S):
            self._request = replace(request, is_urgent=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks and report their state; torch's agent calls it every 0.1 s."""
        ranks = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
        codes = {rank: _exit_code(pid) for rank, pid in ranks.items()}
        running = {rank: pid for rank, pid in ranks.items() if codes[rank] is None}
        self._report_absent_rank(codes)
        self._stop_ranks(codes, running)
        if running and not self._is_time_up(running):
            stuck_ranks = self._stuck_ranks(codes)
            if not stuck_ranks:
                return RunResult(state=WorkerState.HEALTHY)
            self._write_record_of(stuck_ranks)
        if any(codes[rank] != 0 for rank in ranks):
            for pid in ranks.values():
                # Nobody has waited for the process yet, so its number cannot be another group's.
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        codes |= {rank: _await_exit(rank, pid) for rank, pid in running.items()}
        self._killed = tuple(running)
        result: RunResult = super()._monitor_workers(worker_group)
        self._close_attempt(
            {rank: code for rank, code in codes.items() if code is not None}, result
        )
        return result

    def _stop_ranks(self, codes: Mapping[int, int | None], running: Mapping[int, int]) -> None:
        """Decide whether ranks have to stop and when at the latest, and signal them once."""
        now = time.monotonic()
        if self._plan is None or self._plan.number is None:  # no signal has been sent yet
            plan = _plan_stop(codes, self._request, self._grace)
            if running and plan is not None and plan != self._plan:
                self._plan, self._deadline_s = plan, now + plan.seconds
                if plan.number is not None:
                    for pid in running.values():
                        os.kill(pid, plan.number)
                    self._signaled = tuple(running)
        is_urgent = self._request is not None and self._request.is_urgent
        if self._plan is not None and is_urgent and not self._deadline_is_urgent:
            self._deadline_is_urgent = True
            self._deadline_s = min(self._deadline_s, now + time_limits.HURRY_S)

    def _is_time_up(self, running: Mapping[int, int]) -> bool:
        """Whether the ranks that have to stop must be killed."""
        if self._plan is None:
            return False
        # A stopped process handles no signal, and where a rank has failed there is nothing to save.
        is_futile = self._request is None and all(map(_is_stopped, running.values()))
        return time.monotonic() >= self._deadline_s or (is_futile and self._signaled != ())

    def _report_absent_rank(self, codes: Mapping[int, int | None]) -> None:
        """Tell ranks that start their world of a rank that has ended without starting it."""
        statuses = self._recorder.statuses(len(self.attempts))
        absent = [rank for rank, code in codes.items() if code == 0 and rank not in statuses]
        for rank, record in enumerate(self._recorder.rank_records if absent else ()):
            if rank in statuses and statuses[rank].phase is Phase.STARTING:
                record.set_absent_rank(absent[0])

    def _stuck_ranks(self, codes: Mapping[int, int | None]) -> list[int]:
        """Running ranks that do not follow the others out of the job.

        A stuck rank reports itself if it can. Here are those that are stopped or stuck in C.
        """
        statuses = self._recorder.statuses(len(self.attempts))
        if self._rule is None and (limit_s := seconds_to_follow(statuses.values())):
            self._rule = StuckRankRule(limit_s + time_limits.SAY_SO_S)
        if self._rule is None or self._plan is not None:
            return []
        signs = {
            rank: ExitSign(stage=ExitStage.RUNNING if code is None else ExitStage.ENDED)
            for rank, code in codes.items()
        }
        signs |= {rank: sign_of(statuses[rank]) for rank in statuses if codes[rank] is None}
        return list(self._rule.late(signs))

    def _write_record_of(self, stuck_ranks: Sequence[int]) -> None:
        """Leave the record that the first of the stuck ranks cannot write."""
        attempt, rank = len(self.attempts), stuck_ranks[0]
        error = stuck_rank_error(self._recorder.statuses(attempt), stuck_ranks)
        for folder in self._folder.glob(f"*/attempt_{attempt}/{rank}"):
            try:
                FailureRecord.of(error, rank).write(folder / "error.json")
            except OSError as problem:  # the exit code and the flight recorder say the rest
                say(problem, error)

    def _close_attempt(self, codes: Mapping[int, int], result: RunResult) -> None:
        """Record and print how an attempt ended, and prevent another if it must be the last."""
        records = {
            rank: record
            for rank, failure in result.failures.items()
            if (record := FailureRecord.read(failure.error_file)) is not None
        }
        attempt = Attempt(
            number=len(self.attempts) + 1,
            most=self._max_attempts,
            codes=codes,
            signaled=self._signaled,
            killed=self._killed,
            raised=tuple(rank for rank, record in records.items() if not record.follows),
            noticed=tuple(rank for rank, record in records.items() if record.follows),
            stop=None if self.stop is None else self.stop.name,
            hurried=self._request is not None and self._request.is_urgent,
            statuses=self._recorder.statuses(len(self.attempts)),
            held_up=tuple(map(str, verdict(self._recorder.steps(len(self.attempts))))),
        )
        if not attempt.restarts:
            # A private counter of torch's agent: at 0 it starts the ranks no more.
            self._remaining_restarts = 0
        self.attempts.append(attempt)
        attempt.append(self._file)
        text = ", ".join(f"{rank}: {code}" for rank, code in sorted(codes.items()))
        say(
            f"attempt {attempt.number} of {attempt.most}: {attempt.outcome.value} "
            f"(exit codes by rank: {text})"
        )
        self._open_attempt()


def _exit_code(pid: int) -> int | None:
    """How a child ended, negative for a signal; None while it runs. The child is not reaped."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _is_stopped(pid: int) -> bool:
    status = ProcessStatus.of(pid)
    return status is not None and status.stopped


def _await_exit(rank: int, pid: int) -> int:
    """The exit code of a killed rank, after waiting for its end."""
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
    parser.add_argument(
        "--attempts", type=Path, metavar="FILE", help="how each attempt ends; default: in LOG_DIR"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def _spec(options: argparse.Namespace) -> WorkerSpec:
    """What torch's agent runs on each rank."""
    # A rank starts as a program that has the kernel end it with this process, then becomes python.
    start = ("-I", "-S", die_with_parent.__file__, str(os.getpid()), sys.executable)
    program = (*["-m"] * options.module, options.script)
    return WorkerSpec(
        role="rank",
        local_world_size=options.ranks,
        rdzv_handler=LoopbackRendezvous(options.log_dir.name),
        entrypoint=sys.executable,
        args=(*start, "-u", rank_program.__file__, *program, *options.arguments),
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr=LOOPBACK,
    )


def _handle_signals(agent: LocalAgent, parent: int | None) -> None:
    """Have signals, and the death of the parent process if it has a number, stop the job."""
    # torch's agent handles the signals that this variable names. It must name one; none is sent.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does with SIGHUP
            signal.signal(number, agent.request_stop)
    # The kernel sends this signal when the launcher is killed. It must be handled in the background
    # of a shell script, too, where commands start with it ignored.
    signal.signal(signal.SIGQUIT, agent.request_stop)
    if parent is not None:
        die_with_parent.signal_on_death_of_parent(parent, signal.SIGQUIT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of a job to their end; returns the exit code of the job."""
    options = _options(arguments)
    lose_rather_than_raise()
    options.log_dir.mkdir(parents=True, exist_ok=True)
    redirects = dict.fromkeys(range(options.ranks), Std.ALL)
    if options.live:
        redirects[0] = Std.ERR
    logs = DefaultLogsSpecs(log_dir=str(options.log_dir), redirects=redirects)
    recorder = FlightRecorder.create(options.ranks)
    path, _store = create_memory_store()  # which lives as long as this process
    os.environ[VARIABLE] = recorder.path
    os.environ[MEMORY_STORE_VARIABLE] = f"{path} {options.log_dir.name}"
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that crashes shows its stack
    file = options.attempts or options.log_dir / FILE
    agent = LocalAgent(_spec(options), logs, options.log_dir, file, options.grace, recorder)
    _handle_signals(agent, options.end_with)
    if agent.stop is not None:
        return 128 + agent.stop  # before any rank has started
    agent.run()
    return agent.attempts[-1].exit_code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # because an orderly end of torch takes longer than everything else
