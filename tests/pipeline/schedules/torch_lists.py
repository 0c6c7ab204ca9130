"""The schedules of ``torch.distributed.pipelining``, written into files by its own code."""

from pathlib import Path
from types import SimpleNamespace

from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

NAMES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


def make(name: str, ranks: int, microbatches: int):
    """A schedule of PyTorch, made with stages that are never run."""
    kind = schedules.get_schedule_class(name)
    chunks = 1 if issubclass(kind, PipelineScheduleSingle) else 2
    stage = SimpleNamespace(
        num_stages=chunks * ranks,
        group_size=ranks,
        group_rank=0,
        stage_index=0,
        is_last=False,
        has_backward=True,
        submod=nn.Identity(),
    )
    stages = stage if chunks == 1 else [stage] * chunks
    return kind(stages, microbatches, loss_fn=None)


def one_f_one_b(ranks: int, microbatches: int) -> dict[int, list]:
    """What Schedule1F1B runs; its pipeline_order in torch 2.13 lacks actions."""
    orders: dict[int, list] = {}
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        texts = [f"{rank}F{i}" for i in range(ahead)]
        for i in range(microbatches):
            texts.append(f"{rank}B{i}")
            if i + ahead < microbatches:
                texts.append(f"{rank}F{i + ahead}")
        orders[rank] = [schedules._Action.from_str(text) for text in texts]
    return orders


def dump(name: str, ranks: int, microbatches: int, folder: Path) -> dict[str, Path]:
    """Files with the computations alone, and with sends and receives."""
    schedule = make(name, ranks, microbatches)
    files = {form: folder / f"{name}-{ranks}-{form}.csv" for form in ("compute", "comms")}
    if isinstance(schedule, PipelineScheduleSingle):
        order = {rank: list(row) for rank, row in schedule.pipeline_order.items()}
        if name == "1F1B":
            order = one_f_one_b(ranks, microbatches)
        PipelineScheduleMulti._dump_csv(SimpleNamespace(pipeline_order=order), files["compute"])
        lowered = schedules._add_send_recv(order, stage_to_rank=lambda s: s, num_stages=ranks)
        PipelineScheduleMulti._dump_csv(SimpleNamespace(pipeline_order=lowered), files["comms"])
        return files
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    schedule._dump_csv(files["compute"], format="compute_only")
    schedule._dump_csv(files["comms"], format="compute_comms")
    return files
