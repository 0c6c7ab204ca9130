"""Runs ranges of seeds in processes that may crash or hang without ending the whole."""

from __future__ import annotations

import collections
import itertools
import json
import multiprocessing
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.generated.campaign import Outcome, run_batch, run_one
from tests.generated.draw import BLOCK, draw_case

BATCH = BLOCK  # seeds of which those with as many ranks share one start of processes
SILENCE_S = 240.0  # without a line, a worker hangs


def worker(seeds: Sequence[int], technique: str | None, world: str) -> None:
    """Run seeds, and print a line of JSON for each."""
    if world == "threads":
        for seed in seeds:
            print(json.dumps({"begins": seed}), flush=True)
            start = time.monotonic()
            say(seed, run_one(draw_case(seed, technique, world)), time.monotonic() - start)
        return
    multiprocessing.set_forkserver_preload(["tests.preload", "tests.generated.campaign"])
    blocks = itertools.groupby(seeds, lambda seed: seed // BATCH)
    for batch in (list(block) for _, block in blocks):
        print(json.dumps({"begins": batch[0]}), flush=True)
        cases = [draw_case(seed, technique, world) for seed in batch]
        for size in sorted({case["ranks"] for case in cases}):
            start, some = time.monotonic(), [case for case in cases if case["ranks"] == size]
            for case, outcome in zip(some, run_batch(some), strict=True):
                say(case["seed"], outcome, (time.monotonic() - start) / len(some))


def say(seed: int, outcome: Outcome, seconds: float) -> None:
    """One line for one seed."""
    line = {"seed": seed, "kind": outcome.kind, "text": outcome.text, "where": outcome.where,
            "seconds": round(seconds, 3)}  # fmt: skip
    print(json.dumps(line), flush=True)


class Worker:
    """A process that runs seeds."""

    def __init__(self, seeds: range, technique: str | None, world: str) -> None:
        command = [sys.executable, "-m", "tests.generated", "--worker", "--world", world]
        command += ["--seeds", f"{seeds.start}:{seeds.stop}"]
        command += ["--technique", technique] if technique else []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        self._ready = selectors.DefaultSelector()
        self._ready.register(self.process.stdout, selectors.EVENT_READ)

    def line(self) -> dict[str, Any] | None:
        """What it says next; None at its end, and an empty dict when it says nothing any more."""
        if not self._ready.select(SILENCE_S):
            return {}
        text = self.process.stdout.readline()
        return json.loads(text) if text else None

    def end(self) -> int:
        """End it; its exit code."""
        if self.process.poll() is None:
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._ready.close()
        self.process.stdout.close()
        return self.process.wait()


def run_range(
    seeds: range,
    technique: str | None,
    world: str,
    seconds: float | None = None,
    log: str | None = None,
) -> list[dict[str, Any]]:
    """Run a range of seeds; the failures, which are printed with the counts of all.

    Args:
        seconds: begin no seed after them.
        log: a file that gets a line for each seed.
    """
    start, counts = time.monotonic(), collections.Counter[str]()
    failures: list[dict[str, Any]] = []
    next_seed = seeds.start
    while next_seed < seeds.stop:
        one = Worker(range(next_seed, seeds.stop), technique, world)
        current = next_seed
        while True:
            found = one.line()
            if found and "begins" in found:
                current = found["begins"]
                if seconds is not None and time.monotonic() - start > seconds:
                    one.process.kill()
                    one.end()
                    print(f"stopped before seed {current}")
                    return _summary(counts, failures)
                continue
            if not found:
                hangs = found == {}
                if hangs:
                    one.process.kill()
                code = one.end()
                if code == 0 and not hangs:
                    return _summary(counts, failures)
                text = f"no word for {SILENCE_S} s" if hangs else f"exit code {code}"
                found = {"seed": current, "kind": "hang" if hangs else "crash", "text": text}
            counts[found["kind"]] += 1
            next_seed = found["seed"] + 1
            if log:
                with open(log, "a") as file:
                    file.write(json.dumps({**found, "world": world, "technique": technique}) + "\n")
            if found["kind"] not in ("right", "invalid", "refused"):
                failures.append(found)
                print(f"{found['seed']} {found['kind']}: {found.get('where', '')} "
                      f"{found['text']:.160}", flush=True)  # fmt: skip
            if "seconds" not in found:
                break  # the process is gone
    return _summary(counts, failures)


def _summary(
    counts: collections.Counter[str], failures: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()), flush=True)
    return failures
