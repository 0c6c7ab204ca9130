"""What a run did: listeners to events, the files that they write, and a page that shows them.

``meters``    what one rank communicates, and how much memory it holds
``trace``     events as a timeline for Perfetto
``metrics``   the lines of ``metrics.jsonl``
``progress``  the state of a run, for a person who watches
``figures``   the drawings of ``metrics.jsonl``
``report``    ``report.html``, which shows the drawings
``recorder``  all of these together, for a training loop
"""

from echelon.observe.meters import CommMeter, CommTotal, MemoryMeter, tensor_bytes
from echelon.observe.metrics import MetricsWriter, read_metrics
from echelon.observe.progress import Progress
from echelon.observe.recorder import Recorder, RunInfo
from echelon.observe.report import write_report
from echelon.observe.trace import Trace

__all__ = [
    "CommMeter",
    "CommTotal",
    "MemoryMeter",
    "MetricsWriter",
    "Progress",
    "Recorder",
    "RunInfo",
    "Trace",
    "read_metrics",
    "tensor_bytes",
    "write_report",
]
