"""What a run did: listeners to events, the files that they write, and a page that shows them.

``meters``    what one rank communicates, and how much memory it holds
``trace``     events as a timeline for Perfetto
``slow_ranks``  which rank held up the others, and in what
``came_last``  which rank came last in collectives, and what it had done before
``metrics``   the lines of ``metrics.jsonl``
``progress``  the state of a run, for a person who watches
``figures``   the drawings of ``metrics.jsonl``
``report``    ``report.html``, which shows the drawings
``recorder``  all of these together, for a training loop
"""

from echelon.diagnosis.held_up import HeldUp
from echelon.diagnosis.step_rows import Activity
from echelon.observe.came_last import CallLateness, CameLast, Lateness, came_last
from echelon.observe.meters import CommMeter, CommTotal, MemoryMeter, tensor_bytes
from echelon.observe.metrics import MetricsWriter, read_metrics
from echelon.observe.progress import Progress
from echelon.observe.recorder import Recorder, RunInfo
from echelon.observe.report import write_report
from echelon.observe.slow_ranks import held_up
from echelon.observe.trace import Trace, merge_traces

__all__ = [
    "Activity",
    "CallLateness",
    "CameLast",
    "CommMeter",
    "CommTotal",
    "HeldUp",
    "Lateness",
    "MemoryMeter",
    "MetricsWriter",
    "Progress",
    "Recorder",
    "RunInfo",
    "Trace",
    "came_last",
    "held_up",
    "merge_traces",
    "read_metrics",
    "tensor_bytes",
    "write_report",
]
