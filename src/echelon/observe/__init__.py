"""What a run did: listeners to events, the files that they write, and a page that shows them.

``meters``    what one rank communicates, and how much memory it holds
``trace``     events as a timeline for Perfetto
``slow_ranks``  which rank held up the others, and in what
``came_last``  which rank came last in collectives, and what it had done before
``metrics``   the lines of ``metrics.jsonl``
``progress``  the state of a run, for a person who watches
``recorded_run``  the lines of ``metrics.jsonl``, with the attempts of a restarted job in one
``curves``    the drawings over steps and over time
``rank_figures``  the drawings with a row for each rank
``run_sections``  the parts of the page of one run
``run_pair``  the parts of the page of two runs
``report``    ``report.html``, which shows them
``run_info``  what a script says of a run before its first step
``run_output``  what is written and shown of a run, which ends and delays no training
``run_folder``  a new folder, or that of a job that was restarted
``provenance``  commit, versions, host and command
``phases``    what a rank spent its time on
``utilization``  how much a rank could compute
``trackers``  the numbers of a run for TensorBoard, W&B, MLflow, Trackio and Prometheus
``recorder``  all of these together, for a training loop
"""

from echelon.diagnosis.held_up import HeldUp
from echelon.diagnosis.step_rows import Activity
from echelon.observe.came_last import CallLateness, CameLast, Lateness, came_last
from echelon.observe.meters import CommMeter, CommTotal, MemoryMeter, tensor_bytes
from echelon.observe.metrics import MetricsWriter, read_metrics
from echelon.observe.progress import Progress
from echelon.observe.recorder import Recorder
from echelon.observe.report import write_comparison, write_report
from echelon.observe.run_info import RunInfo
from echelon.observe.slow_ranks import held_up
from echelon.observe.trace import Trace, merge_traces
from echelon.observe.trackers.tracker import Tracker
from echelon.observe.trackers.tracking import Tracking, send_run, track
from echelon.observe.utilization import matmul_flops

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
    "Tracker",
    "Tracking",
    "came_last",
    "held_up",
    "matmul_flops",
    "merge_traces",
    "read_metrics",
    "send_run",
    "tensor_bytes",
    "track",
    "write_comparison",
    "write_report",
]
