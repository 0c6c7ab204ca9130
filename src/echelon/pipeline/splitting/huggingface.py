"""Causal language models of ``transformers``, whose forward can begin at a hidden state.

Every stage runs the model's own ``forward``, so masks and rotary tables are made where they are
used, and only the hidden state goes from stage to stage. A stage that is not the first passes it as
``inputs_embeds``; a stage that is not the last has no norm and no head, so its "logits" are the
hidden state. ``transformers`` is not imported here: only a user of its models needs it.

A wrapper of ``peft`` with adapters may be around such a model, if its forward is that of the model
inside. Then the model inside is cut, and the names are those of the wrapper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError
from echelon.pipeline.splitting.fake_tensors import FakeTensorCache, fake_copy
from echelon.pipeline.splitting.submodule import (
    Blocks,
    Submodule,
    empty_block,
    partial_model,
    return_input,
)


@final
class _ZeroEmbedding(nn.Module):
    """Replaces an embedding of positions, which the hidden state already contains."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


@final
@dataclass(frozen=True)
class _Architecture:
    """The names of the modules of one class of models.

    Attributes:
        list_name: the list of blocks.
        prefix: modules that only the first stage has.
        suffix: modules that only the last stage has.
        everywhere: modules without parameters, which every stage has.
        inert: modules without effect in a stage that begins at a hidden state, and replacements.
    """

    list_name: str
    prefix: tuple[str, ...]
    suffix: tuple[str, ...]
    everywhere: tuple[str, ...]
    inert: Mapping[str, Callable[[], nn.Module]]


_LLAMA = _Architecture(
    list_name="model.layers",
    prefix=("model.embed_tokens",),
    suffix=("model.norm", "lm_head"),
    everywhere=("model.rotary_emb",),
    inert={},
)
_GPT2 = _Architecture(
    list_name="transformer.h",
    prefix=("transformer.wte", "transformer.wpe", "transformer.drop"),
    suffix=("transformer.ln_f", "lm_head"),
    everywhere=(),
    inert={"transformer.wpe": _ZeroEmbedding, "transformer.drop": nn.Identity},
)
# By class and not by structure: a model that scales its embeddings has the same modules.
_ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "GPT2LMHeadModel": _GPT2,
}
_KWARGS = {"attention_mask", "position_ids"}


def find_known(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The name in ``model`` of a model that this file can cut, and that model; None without one."""
    path = _path_in_peft_model(model)
    inner = model.get_submodule(path)
    cls = type(inner)
    known = cls.__module__.startswith("transformers.") and cls.__name__ in _ARCHITECTURES
    return (path, inner) if known else None


def _path_in_peft_model(model: nn.Module) -> str:
    """The name of the model inside a wrapper of ``peft`` with the same forward; empty if none."""
    cls: Any = type(model)
    if cls.__module__ == "peft.peft_model" and cls.__name__ in (
        "PeftModel",
        "PeftModelForCausalLM",
    ):
        tuner, path = model.get_submodule("base_model"), "base_model.model"
        cls = type(tuner)
    else:
        tuner, path = model, "model"
    # Other wrappers add to the loss (AdaLoRA), mix adapters (X-LoRA), or give the model a prompt.
    bases = [base for base in cls.__mro__ if base.__module__ == "peft.tuners.tuners_utils"]
    if not any(base.__name__ == "BaseTuner" and base.forward is cls.forward for base in bases):
        return ""
    configs = getattr(tuner, "peft_config", {}).values()
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return ""  # such an adapter looks for tokens, which only the first stage has
    return path if all(name.startswith(f"{path}.") for name in _names_of_tensors(model)) else ""


def _names_of_tensors(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))


@final
class CausalLMBlocks(Blocks):
    """The blocks of a causal language model; the first has the embedding, the last the head.

    ``path`` is the name of ``model`` in a wrapper around it, or empty.
    """

    def __init__(self, model: nn.Module, path: str = "") -> None:
        self._path = f"{path}." if path else ""
        self._model, self._architecture = model, _ARCHITECTURES[type(model).__name__]
        if getattr(model.config, "output_router_logits", False):
            raise ArgumentError(
                f"this {type(model).__name__} gives the logits of its routers, of which a stage "
                "knows those of its own blocks only: set config.output_router_logits = False"
            )
        self.modules = list(model.get_submodule(self._architecture.list_name).children())

    @property
    def num_blocks(self) -> int:
        """The number of items of the model's list of blocks."""
        return len(self.modules)

    def submodule(self, start: int, stop: int) -> Submodule:
        """A stage that runs the model's forward around its blocks."""
        architecture, cache = self._architecture, FakeTensorCache()
        is_first, is_last = start == 0, stop == self.num_blocks

        def make_stand_in(module: nn.Module, name: str) -> nn.Module:
            if name in architecture.inert:
                return architecture.inert[name]()
            # Without norm and head, what the model calls logits is the hidden state.
            if name in architecture.suffix:
                return nn.Identity()
            return fake_copy(module, self._path + name, cache)

        list_name = architecture.list_name
        blocks = [
            block if start <= i < stop else empty_block(block, return_input)
            for i, block in enumerate(self.modules)
        ]
        names = {
            *(architecture.prefix if is_first else ()),
            *(architecture.suffix if is_last else ()),
            *architecture.everywhere,
        }
        copied = partial_model(self._model, list_name, blocks, names, make_stand_in, cache)
        modules = copied.modules | {f"{list_name}.{i}": self.modules[i] for i in range(start, stop)}
        body = _HiddenToHidden(copied.model, is_first, is_last)
        return Submodule(body, self._named(modules), self._named(copied.containers))

    def _named(self, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        return {(self._path + name).removesuffix("."): module for name, module in modules.items()}


@final
class _HiddenToHidden(nn.Module):
    """The model's forward from a hidden state to a hidden state."""

    def __init__(self, model: nn.Module, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model, self._is_first, self._is_last = model, is_first, is_last
        self._signature = inspect.signature(model.forward)
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            call = dict(self._signature.bind_partial(*args).arguments) | kwargs
            tokens = {key: call.pop(key) for key in ("input_ids", "inputs_embeds") if key in call}
            first_kwargs = _names_given(call)
        else:
            (received,) = args
            call, first_kwargs = kwargs, received["given"]
            tokens = {"inputs_embeds": received["hidden"]}
        self._check(_names_given(call), first_kwargs)
        first: Tensor = next(iter(tokens.values()), torch.empty(0))
        if first.is_meta:
            # This is a dry run, in which positions have no values. transformers reads them to find
            # packed sequences, unless the mask is complete.
            size, length = first.shape[:2]
            call["attention_mask"] = first.new_ones((size, 1, length, length), dtype=torch.bool)
        output = self.model(**tokens, **call, use_cache=False)
        return output if self._is_last else {"hidden": output.logits, "given": first_kwargs}

    def _check(self, names: tuple[str, ...], first_names: tuple[str, ...]) -> None:
        if not set(names) <= _KWARGS:
            raise ArgumentError(
                f"a stage of {type(self.model).__name__} was given "
                f"{sorted({*names} - _KWARGS)}; it takes {sorted(_KWARGS)} "
                "(labels are the target of step(), and the loss is Pipeline's loss_fn; a cache of "
                "keys and values is not kept by stages)"
            )
        if names != first_names:
            raise ArgumentError(
                f"this stage was given {list(names)} and the first one {list(first_names)}: give "
                "all ranks the same keyword arguments, since every stage makes its own mask"
            )


def _names_given(kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the keyword arguments that are not None."""
    return tuple(sorted(key for key, value in kwargs.items() if value is not None))
