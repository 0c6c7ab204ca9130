"""The recorder of a training script, which shows, writes and draws what the run does."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import nn

from echelon import checks, events
from echelon.comm.world import World
from echelon.observe.came_last import came_last
from echelon.observe.meters import (
    CommMeter,
    Look,
    MemoryMeter,
    MemoryTimeline,
    SaveMeter,
    hidden_bytes,
    tensor_bytes,
)
from echelon.observe.metrics import failure_text
from echelon.observe.phases import phase_seconds
from echelon.observe.provenance import provenance
from echelon.observe.run_folder import JobAttempt, MetricsFolder
from echelon.observe.run_info import RunInfo
from echelon.observe.run_output import RunOutput
from echelon.observe.slow_ranks import held_up
from echelon.observe.trace import Trace, write_trace
from echelon.observe.trackers.tracked_values import tracked_config, tracked_values
from echelon.observe.trackers.tracker import Tracker
from echelon.observe.trackers.tracking import Tracking, chosen_trackers, open_trackers
from echelon.process.command_words import masked_value

FORMAT_VERSION = 1
Span = tuple[int, object, float, float]  # rank, what ran, start, end
_SHOWN_STEPS = 20  # the shown speed is the mean over so many steps, without the first of the run


@final
class Recorder:
    """Records a run in a folder: ``metrics.jsonl``, ``report.html`` and, if asked, ``trace.json``.

    Every rank makes a recorder and all leave it together: its end is a collective, which sends the
    memory and communication of all ranks to rank 0. Only rank 0 writes and shows anything. While
    the run goes on, rank 0 draws the page again after ``PAGE_S`` seconds or later, in the
    background, for at most a hundredth of the time. Where something cannot be written or shown, a
    warning says so once, and training goes on. If the body raises, nothing is collected, and the
    page shows what there is. In a replay of a step nothing is written or shown.

    Args:
        folder: where to write. If it exists, the first of ``folder-2``, ``folder-3`` … that does
            not exist is taken, so that no run overwrites another; but a job that its launcher
            restarts goes on in the folder that it had.
        trace: whether to write a timeline of all events, for Perfetto.
        to: trackers that get the numbers too, as those of ``track``.
        per_rank: track each rank as a run of its own, instead of rank 0 alone.

    Attributes:
        folder: where rank 0 writes; None on the others.

    Example:
        >>> # with Recorder(world, "runs/gpt", RunInfo(total_steps=100)) as recorder:
        >>> #     for step in range(100):
        >>> #         ...
        >>> #         recorder.step(step + 1, loss.item(), num_tokens=4096)
    """

    def __init__(
        self,
        world: World,
        folder: str | os.PathLike[str],
        info: RunInfo,
        *,
        trace: bool = False,
        to: Sequence[str | Tracker] = (),
        per_rank: bool = False,
    ) -> None:
        checks.instance("world", world, World)
        checks.path("folder", folder)
        checks.instance("info", info, RunInfo)
        checks.flag("trace", trace)
        checks.flag("per_rank", per_rank)
        self._trackers = chosen_trackers(to)
        self._per_rank = per_rank
        self._tracking = Tracking([], {})
        self.info = info
        self._world = world
        attempt = JobAttempt.of(os.environ)
        self.memory = MemoryMeter(world.rank)
        self.comm = CommMeter(world.rank)
        self._trace = Trace(world.rank) if trace else None
        writes = world.rank == 0 and not world.is_replay
        self._place = MetricsFolder.take(Path(folder), attempt) if writes else None
        self.folder = self._place.path if self._place is not None else None
        self._attempt = attempt
        self._saves = SaveMeter(world.rank)
        self._phases: dict[str, float] = {}  # seconds so far, as of the last step
        is_continued = self._place is not None and self._place.is_continued
        self._output = RunOutput(self.folder, is_continued, info)
        self._stack = ExitStack()
        self._steps = 0
        self._timeline: tuple[MemoryTimeline, ExitStack] | None = None  # of the step under way
        self._recent_s: deque[float] = deque(maxlen=_SHOWN_STEPS)
        self._start_s = self._mark_s = time.perf_counter()

    def _open_trackers(self) -> Tracking:
        folder = self.folder
        if self._per_rank and self._trackers:
            folder = Path(self._world.group.broadcast_object(str(folder), src=0))
        remedy = (
            " metrics.jsonl has all numbers; send them again with: "
            f"echelon report --to {{name}} {folder}"
        )
        return open_trackers(self._world, folder or Path(), self._trackers, self._per_rank, remedy)

    def __enter__(self) -> Self:
        self._tracking = self._stack.enter_context(self._open_trackers())
        for meter in (self.memory, self.comm, self._trace, self._saves):
            if meter is not None:
                self._stack.enter_context(events.listen(meter))
        facts = self._start_facts()
        self._output.open()
        if self.folder is not None:
            self._output.write("start", name=self.folder.name, **facts)
        self._tracking.config(tracked_config(facts))
        self._start_s = self._mark_s = time.perf_counter()
        return self

    def _start_facts(self) -> dict[str, Any]:
        return {
            "version": FORMAT_VERSION,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "unix_s": time.time(),
            "job": self._attempt.job,
            "attempt": self._attempt.number,
            "ranks": self._world.size,
            "backend": self._world.backend,
            "device": str(self._world.device),
            **{item.name: getattr(self.info, item.name) for item in fields(self.info)},
            "references": dict(self.info.references),
            "config": masked_value("config", self.info.config),
            "environment": provenance(self._world.device, self._world.size),
        }

    def _write(self, kind: str, **values: Any) -> None:
        """Write a line on rank 0, and send its numbers to the trackers of this rank."""
        self._output.write(kind, **values)
        if self._tracking.is_active and (numbers := tracked_values({"kind": kind, **values})):
            self._tracking.log(numbers, values["step"])

    def step(self, step: int, loss: float, num_tokens: int, **values: float) -> None:
        """Record that ``step`` steps are done.

        Args:
            loss: the loss of this step, over all ranks.
            num_tokens: the number of tokens of this step on all ranks together.
            values: further numbers, such as ``learning_rate`` and ``gradient_norm``; the page has
                a curve of each.
        """
        checks.integer("step", step)
        seconds, self._steps = self._lap(), step
        self._end_timeline(step)
        if not self._output.is_active and not self._tracking.is_active:
            return
        if len(self._recent_s) == 1 and step == 2:
            self._recent_s.clear()  # the first step also allocates and warms up
        self._recent_s.append(seconds)
        self._write(
            "step",
            step=step,
            time_s=round(self._mark_s - self._start_s, 4),
            loss=loss,
            tokens_per_s=round(num_tokens / seconds, 1),
            process_peak=self.memory.process_peak(self._world.device),
            memory={name: total.live for name, total in self.memory.totals.items()},
            phases=self._phases_of_step(),
            **values,
        )
        self._write_saves()
        if not self._output.is_active:
            return
        step_s = sum(self._recent_s) / len(self._recent_s)
        self._output.update(
            step,
            loss=loss,
            tokens_per_s=num_tokens / step_s,
            nbytes=self.memory.process_peak(self._world.device),
            left_s=(self.info.total_steps - step) * step_s,
        )

    def _phases_of_step(self) -> dict[str, float]:
        """Seconds by phase since the step before; nothing for the first one, which warms up."""
        before = self._phases
        self._phases = phase_seconds(self._world.steps.time.rows.totals())
        spans = {name: self._phases[name] - before.get(name, 0.0) for name in self._phases}
        return {name: round(seconds, 6) for name, seconds in spans.items() if seconds > 0}

    def _write_saves(self) -> None:
        for save in self._saves.take() if self._output.is_active else ():
            self._output.write(
                "save",
                step=save.facts["step"],
                time_s=round(save.start_s + save.seconds - self._start_s, 4),
                seconds=round(save.seconds, 4),
                nbytes=save.facts["nbytes"],
            )

    def evaluation(self, step: int, loss: float) -> None:
        """Record the validation loss after ``step`` steps; its time counts for no step."""
        checks.integer("step", step)
        self._lap()
        self._write(
            "evaluation", step=step, time_s=round(self._mark_s - self._start_s, 4), loss=loss
        )
        compared = "".join(
            f"  ({name} {value:.3f})" for name, value in self.info.references.items()
        )
        self._output.say(
            f"step {step}/{self.info.total_steps}  validation loss {loss:.3f} "
            f"{self.info.unit}{compared}"
        )

    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Enter the memory of parameters, gradients and optimizer state on this rank now.

        It also enters what ``FSDP`` holds besides them, also in the stages of a pipeline: unsharded
        parameters and communication memory.
        """
        hidden = hidden_bytes(model)
        live = {category: now for category, (now, _) in hidden.items()}
        peaks = {category: most for category, (_, most) in hidden.items()}
        self.memory.measure({**tensor_bytes(model, optimizer), **live}, peaks)

    def watch(self, look: Look) -> None:
        """Draw the memory of rank 0 from now until the next ``step``.

        Args:
            look: returns the bytes that are held now, by category. Rank 0 calls it at every event,
                on the thread that emits the event; it must not communicate.

        Example:
            >>> # recorder.watch(lambda: model.memory_stats(optimizer).by_category())
        """
        if self.folder is not None and self._timeline is None:
            timeline, listening = MemoryTimeline(self._world.rank, look), ExitStack()
            listening.enter_context(events.listen(timeline))
            self._stack.callback(listening.close)
            self._timeline = timeline, listening

    def _end_timeline(self, step: int) -> None:
        if self._timeline is None:
            return
        timeline, listening = self._timeline
        self._timeline = None
        listening.close()
        self._output.write("memory", step=step, rank=timeline.rank, **timeline.record())

    def note(self, title: str, text: str) -> None:
        """Show a text and keep it for the page."""
        self._lap()
        self._output.write("note", title=title, text=text)
        self._output.say(f"{title}:\n{text}" if "\n" in text else f"{title}: {text}")

    def timelines(
        self,
        timelines: Mapping[str, Iterable[tuple[int, object, float, float]]],
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Draw timelines of what ran on each rank, one below the other.

        Args:
            timelines: the timelines by name, from top to bottom. Each has tuples of the rank, what
                ran, and when it began and ended, in seconds, as the ``steps`` of timelines of
                ``echelon.pipeline``. Those of rank 0 are kept.
            ranks: the ranks in the job that these ranks are, as ``measured.ranks``; None: they are
                those of the job. In a plan the ranks of a pipeline are some of the job's.

        Example:
            >>> # planned, ran = measured.simulation.timeline, measured.timeline
            >>> # recorder.timelines({"planned": planned.steps, "measured": ran.steps},
            >>> #                    ranks=measured.ranks)
        """
        self._lap()
        if not self._output.is_active:
            return
        rows = {
            name: [
                [rank if ranks is None else ranks[rank], str(what), start, end]
                for rank, what, start, end in steps
            ]
            for name, steps in timelines.items()
        }
        self._output.write("timelines", step=self._steps, timelines=rows)

    def _lap(self) -> float:
        """Seconds since the last record."""
        now = time.perf_counter()
        seconds, self._mark_s = now - self._mark_s, now
        return max(seconds, 1e-9)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._stack:
            self._write_saves()
            if error is None:
                self._collect()
            else:
                self._output.write("failure", text=failure_text(error))
        self._output.close()

    def _collect(self) -> None:
        """Gather what all ranks have counted, and write it on rank 0. All ranks call it."""
        summary = {
            "rank": self._world.rank,
            "pid": os.getpid(),
            "process_peak": self.memory.process_peak(self._world.device),
            "memory": {name: asdict(total) for name, total in self.memory.totals.items()},
            "comm": {op: asdict(total) for op, total in self.comm.totals.items()},
            "groups": {
                group: {op: asdict(total) for op, total in totals.items()}
                for group, totals in self.comm.by_group.items()
            },
            "phases": phase_seconds(self._world.steps.time.rows.totals()),
        }
        rows = self._trace.rows if self._trace is not None else None
        host = platform.node()
        ranks = self._world.group.all_gather_object((summary, rows, host))
        notes = {"Who held us up": "\n".join(map(str, held_up(self._world)))}
        # Simulated ranks run one after another, and clocks of hosts differ.
        shares_clock = self._world.backend not in ("threads", "single")
        late = None
        if shares_clock and {host for *_, host in ranks} == {host}:
            late = came_last(self._world)
            notes["Who came last"] = str(late)
        summaries = [summary for summary, *_ in ranks]
        tracked = {"kind": "ranks", "ranks": [summary] if self._per_rank else summaries}
        self._tracking.log(tracked_values(tracked), self._steps)
        if not self._output.is_active:
            return
        if late is not None:
            self._output.write("waits", waited_s=late.waited_s)
        self._output.write("ranks", ranks=summaries)
        for title, text in notes.items():
            if text:
                self._output.write("note", title=title, text=text)
        if self._trace is not None:
            traces = [rows for _, rows, _ in ranks]
            self._output.write_file("trace.json", lambda path: write_trace(path, traces))
        self._output.write("end", time_s=self._mark_s - self._start_s, steps=self._steps)
