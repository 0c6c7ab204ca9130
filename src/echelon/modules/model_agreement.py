"""Checks that all ranks hold the same model: its structure always, its values on request."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from echelon.comm.agreement import ObjectGatherer, agree
from echelon.comm.buffers import is_expanded
from echelon.comm.object_bytes import flat_bytes
from echelon.errors import ArgumentError, UnsupportedError

Init = Literal["broadcast", "verify", "trust"]  # how parameters become equal at the start


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether its elements lie in its memory, so that ranks can send, compare and shard them.

    DTensors and quantised weights that are classes of their own carry out operations themselves.
    """
    return isinstance(tensor, FakeTensor) or (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def check_model(
    module: nn.Module,
    device: torch.device,
    *,
    size: int,
    ignored: Collection[nn.Parameter],
    meta: bool = False,
) -> None:
    """Refuse a model that cannot be shared by ``size`` ranks on ``device``, by an ArgumentError.

    ``ignored`` parameters may be of any class. With ``meta``, parameters and buffers may be on the
    meta device.
    """
    left_alone = {id(param) for param in ignored}
    _check_modules(module, size, left_alone)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not has_plain_memory(tensor):
            if id(tensor) not in left_alone:
                raise _not_plain(name, tensor)
        else:
            _check_tensor(name, tensor, device, meta=meta)
    for name, param in module.named_parameters():
        if has_plain_memory(param) and is_expanded(param):
            raise ArgumentError(
                f"parameter {name!r} was expanded: several of its {param.numel()} elements are one "
                "place in memory, which no optimizer can update. Make it with .contiguous()"
            )


def _not_plain(name: str, tensor: Tensor) -> ArgumentError:
    kind = type(tensor).__name__
    if not isinstance(tensor, nn.Parameter):
        do = "Give the buffer plain memory, or keep the tensor in an attribute that is no buffer"
    elif hasattr(tensor, "placements"):  # a DTensor, whose module torch.distributed may not have
        do = (
            "Wrap the plain model, and let ec.Plan or torch's own fully_shard share it over "
            "several axes; or name the parameter in ignored=, then its gradient is not reduced here"
        )
    else:
        do = (
            "Name the parameter, or its module, in ignored=: each rank then keeps the value that "
            "it has, which must be the same on all ranks, and all other parameters train"
        )
    return ArgumentError(
        f"{name!r} is a {kind}, a class of tensors with operations of its own, and ranks exchange "
        f"the memory of plain tensors. {do}"
    )


def _check_modules(module: nn.Module, size: int, left_alone: Collection[int]) -> None:
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"module {name or 'SyncBatchNorm'!r} is a SyncBatchNorm, which talks through "
                "torch.distributed and would silently use the statistics of its own rank here: use "
                "a norm that does not mix samples (GroupNorm, LayerNorm), or BatchNorm with "
                "statistics of each rank's batch"
            )
        if isinstance(submodule, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"module {name or type(submodule).__name__!r} is a ScriptModule, whose parameters "
                "are not Python's: wrap the module that it was made of"
            )
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            raise UnsupportedError(
                f"module {name or type(submodule).__name__!r} makes sparse gradients, "
                "and ranks exchange dense ones: build it with sparse=False"
            )
        if size > 1 and getattr(submodule, "max_norm", None) is not None:
            _check_max_norm(name, submodule, left_alone)
    if size > 1:
        refuse_scale_grad_by_freq(module, "this rank's part")


def refuse_scale_grad_by_freq(module: nn.Module, part: str) -> None:
    """Refuse an embedding whose gradients depend on how a batch is cut, here into ``part``.

    Raises:
        UnsupportedError: a module counts how often a row is in what its forward is given.
    """
    for name, submodule in module.named_modules():
        if getattr(submodule, "scale_grad_by_freq", False):
            raise UnsupportedError(
                f"module {name or type(submodule).__name__!r} has scale_grad_by_freq=True, which "
                f"divides by how often a row is in {part}, not in the whole batch: build it without"
            )


def _check_max_norm(name: str, module: nn.Module, left_alone: Collection[int]) -> None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) not in left_alone:
        raise ArgumentError(
            f"module {name or type(module).__name__!r} has max_norm={module.max_norm}, so its "
            "forward writes the rows that it looks up, which differ from rank to rank: build it "
            "without max_norm, and after optimizer.step() call weight.copy_(torch.renorm(weight, "
            "2, 0, max_norm)) under torch.no_grad() on all ranks (in FSDP inside "
            "full_parameters(writeback=True))"
        )


def _check_tensor(name: str, tensor: Tensor, device: torch.device, *, meta: bool) -> None:
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
    if not has_plain_memory(tensor):
        return f"none, it is a {type(tensor).__name__}"
    if tensor.is_meta:
        return "none, it is on the meta device"
    data = flat_bytes(tensor).numpy()
    return hashlib.blake2b(data.data, digest_size=8).hexdigest()
