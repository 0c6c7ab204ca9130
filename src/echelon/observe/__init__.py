"""What a run did: subscribers to events, the files they write, and a page that shows them."""

from echelon.observe.comm_meter import CommMeter, CommTotal
from echelon.observe.memory_meter import MemoryMeter, tensor_bytes
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
