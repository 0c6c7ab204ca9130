"""The model of a plan, from what a user has: sizes, a file, or a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from echelon.errors import ArgumentError
from echelon.planner.model_file import read_transformer, transformer_of
from echelon.planner.operations import CountedModel, PlannedModel
from echelon.planner.transformer import Transformer


@runtime_checkable
class ModelConfig(Protocol):
    """The configuration of a model of ``transformers``."""

    model_type: str
    to_dict: Callable[[], dict[str, Any]]


@runtime_checkable
class Module(Protocol):
    """A ``torch.nn.Module``, which is known without torch."""

    named_modules: Callable[..., Any]
    register_forward_pre_hook: Callable[..., Any]


Describable = PlannedModel | Module | str | os.PathLike[str] | ModelConfig


def described(model: Describable, seq: int | None = None, example: Any = None) -> PlannedModel:
    """The sizes of what a user has, or what a module computes.

    Args:
        model: a module, also on the meta device; sizes, the path of a JSON with them or with a
            configuration of ``transformers``, the folder of the latter, or the configuration.
        seq: tokens of a sequence; None: as many as the model says.
        example: a batch of a module, or a tuple of arguments; only shapes count.

    Raises:
        ArgumentError: it is none of these, or does not say all sizes.

    Example:
        >>> sizes = Transformer(
        ...     layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=32, gated=False,
        ...     vocab=100, seq=16, tied=True,
        ... )
        >>> described(sizes, seq=64).seq
        64
    """
    if isinstance(model, Module):
        return _traced(model, seq, example)
    if example is not None:
        raise ArgumentError("example is a batch of a module, and model is none: leave it out")
    if isinstance(model, CountedModel):
        return model
    if isinstance(model, Transformer):
        return model if seq is None else replace(model, seq=seq)
    if isinstance(model, str | os.PathLike):
        return read_transformer(Path(model), seq)
    if isinstance(model, ModelConfig) and not isinstance(model, type):
        value = model.to_dict()
        if isinstance(value, Mapping):
            return transformer_of(value, type(model).__name__, seq)
    raise ArgumentError(
        f"model is {model!r:.80}; give a torch.nn.Module with an example, the path of a JSON with "
        "its sizes, a configuration of transformers or its folder, or a Transformer(...) of "
        "echelon.planner.transformer"
    )


def _traced(module: Any, seq: int | None, example: Any) -> CountedModel:
    if example is None or seq is not None:
        raise ArgumentError(
            f"model is a module, {type(module).__name__}: give example, a batch or a tuple of "
            "arguments with sequences as long as those of the training, and no seq"
        )
    from echelon.planner.model_tracing import trace_model  # which brings torch

    return trace_model(module, example)
