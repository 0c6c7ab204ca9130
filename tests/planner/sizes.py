"""Models, clusters and constants that the tests of the planner share."""

from echelon.planner.cluster import Cluster, HostMemory
from echelon.planner.device import Device
from echelon.planner.layout import Layout
from echelon.planner.layout_space import LayoutSpace, SearchLimits
from echelon.planner.operations import PlannedModel
from echelon.planner.software_stack import Rates, SoftwareStack
from echelon.planner.transformer import Transformer

# Round numbers, so that each term can be computed by hand.
DEVICE = Device(
    name="round",
    memory=80e9,
    peak=400e12,
    matmul=200e12,
    attention=100e12,
    bandwidth=1e12,
    link=200e9,
    bus=100e9,
    processors=64,
)
RATES = Rates(
    matmul=1.0,
    waves=0.0,
    kernel_s=0.0,
    launch_s=0.0,
    memory=1.0,
    attention=1.0,
    scores=0.5,
    score_passes=4.0,
    block_passes=10.0,
    ffn_passes=2.0,
    logit_bytes=8.0,
    bus=1.0,
    latency_s=0.0,
    network=1.0,
    network_latency_s=0.0,
    message=1.0,
    contention=0.0,
    optimizer=1.0,
    drift=0.0,
    step_s=0.0,
)
STACK = SoftwareStack(name="round", rates=RATES)
MODEL = Transformer(
    layers=4,
    hidden=1024,
    heads=8,
    kv_heads=8,
    head_dim=128,
    ffn=4096,
    gated=False,
    vocab=32768,
    seq=2048,
    tied=False,
)
HOST = HostMemory(memory=1e12, bandwidth=400e9, link=20e9)


def cluster(hosts: int, devices: int) -> Cluster:
    """Hosts of the round device with 100 GB/s between them."""
    return Cluster(hosts=hosts, devices_per_host=devices, device=DEVICE, network=100e9)


def layouts(model: PlannedModel, place: Cluster, limits: SearchLimits) -> list[Layout]:
    """Every layout of a space."""
    families = LayoutSpace(model, place, STACK, limits).families()
    return [layout for family in families for layout in family.layouts()]
