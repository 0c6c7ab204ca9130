"""What a run did: subscribers to events, the files they write, and a page that shows them.

``meters``    what one rank communicates and holds
``trace``     events as a timeline for Perfetto
``metrics``   ``metrics.jsonl``, line by line
``progress``  how a run is going, for a person who watches
``figures``   drawings of what ``metrics.jsonl`` says
``report``    ``report.html``, made of them
``recorder``  all of these, for a training loop
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
