"""Checks that all ranks hold the same model: its structure always, its values on request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from echelon.comm.agreement import ObjectGatherer, agree
from echelon.comm.buffers import is_expanded
from echelon.comm.object_bytes import flat_bytes
from echelon.errors import ArgumentError

Init = Literal["broadcast", "verify", "trust"]  # how parameters become equal at the start


def check_model(module: nn.Module, device: torch.device, *, meta: bool = False) -> None:
    """Refuse a model that cannot be replicated over ranks on ``device``, by an ArgumentError.

    With ``meta``, parameters and buffers may be on the meta device.
    """
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.SyncBatchNorm):
            raise ArgumentError(
                f"module {name or 'SyncBatchNorm'!r} is a SyncBatchNorm, which talks through "
                "torch.distributed and would silently use the statistics of its own rank here: use "
                "a norm that does not mix samples (GroupNorm, LayerNorm), or BatchNorm with "
                "statistics of each rank's batch"
            )
        if isinstance(submodule, torch.jit.ScriptModule):
            raise ArgumentError(
                f"module {name or type(submodule).__name__!r} is a ScriptModule, whose parameters "
                "are not Python's: wrap the module that it was made of"
            )
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            raise ArgumentError(
                f"module {name or type(submodule).__name__!r} makes sparse gradients, "
                "and ranks exchange dense ones: build it with sparse=False"
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ArgumentError(
                f"parameter {name!r} has no shape yet: run one batch through the model before "
                "wrapping it"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ArgumentError(
                f"{name!r} is {tensor.dtype} with layout {tensor.layout}, and ranks exchange dense "
                "tensors of plain numbers: make it one with .to_dense() or .dequantize()"
            )
        if tensor.is_inference():
            raise ArgumentError(
                f"{name!r} was made in inference mode, so it cannot be trained or broadcast: build "
                "the model outside of torch.inference_mode()"
            )
        if tensor.device != device and not (meta and tensor.is_meta):
            raise ArgumentError(
                f"{name!r} is on {tensor.device} and the group is on {device}: "
                f"move the model there before wrapping it"
            )
    for name, param in module.named_parameters():
        if is_expanded(param):
            raise ArgumentError(
                f"parameter {name!r} was expanded: several of its {param.numel()} elements are one "
                "place in memory, which no optimizer can update. Make it with .contiguous()"
            )


def option_facts(options: Any) -> dict[str, str]:
    """Every option of a dataclass as text, for ranks to compare."""
    return {item.name: repr(getattr(options, item.name)) for item in fields(options)}


def check_agreement(
    module: nn.Module,
    options: Mapping[str, str],
    ranks: ObjectGatherer,
    *,
    values: bool,
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> list[frozenset[str]]:
    """Compare the model and the options of all ranks; a difference is a ModelMismatch on all.

    With ``values``, the hashes of parameters and buffers are compared, too. ``more`` has other
    texts that must agree, by kind and name. Devices are not compared, but a tensor on the meta
    device never equals one with values. Returns, by rank, the names of the tensors on meta.
    """
    facts: dict[str, Mapping[str, str]] = {
        "option": dict(options),
        "parameter": {name: _describe(param) for name, param in module.named_parameters()},
        "buffer": {name: _describe(buffer) for name, buffer in module.named_buffers()},
    }
    if values:
        facts["the values of parameter"] = {n: digest(p) for n, p in module.named_parameters()}
        facts["the values of buffer"] = {n: digest(b) for n, b in module.named_buffers()}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    by_rank = agree(ranks, {**facts, **(more or {})}, beside=on_meta)
    return [frozenset(names) for names in by_rank]


def _describe(tensor: Tensor) -> str:
    """Text such as ``float32[3, 4]``, with all else that flat buffers depend on."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not tensor.is_contiguous():
        text += f" strides {tensor.stride()}"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        text += " frozen"
    return text


def digest(tensor: Tensor) -> str:
    """A hash of the values of a tensor, in the order of its elements."""
    if tensor.is_meta:
        return "none, it is on the meta device"
    data = flat_bytes(tensor).numpy()
    return hashlib.blake2b(data.data, digest_size=8).hexdigest()
