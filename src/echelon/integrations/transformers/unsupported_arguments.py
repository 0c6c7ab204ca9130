"""Options and batches that ``EchelonTrainer`` refuses, each with its reason."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler

from echelon.errors import ArgumentError, UnsupportedError
from echelon.integrations.sharing import Sharing

# Optimizers that treat each element of a parameter by itself; a shard is enough for them.
_ELEMENTWISE = {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"}
_OPTIONS = "give ec.DDP's own option in options"
_REASONS = {
    "fsdp": "give plan='fsdp'",
    "deepspeed": "give plan='fsdp', whose strategies are those of ZeRO",
    "parallelism_config": "give plan=ec.Plan(...)",
    "fp16": "it needs a scaler that knows shards: use bf16",
    "torch_compile": "a compiled model cannot be wrapped: compile its blocks",
    "auto_find_batch_size": "a rank that runs out of memory cannot go back alone",
    "push_to_hub": "upload the folder of save_model() when the training is over",
    "save_on_each_node": "the ranks write one checkpoint into a folder that all hosts see",
    "ddp_bucket_cap_mb": f"{_OPTIONS}: bucket_bytes",
    "ddp_broadcast_buffers": f"{_OPTIONS}: broadcast_buffers",
    "ddp_static_graph": "no graph has to be static",
    "enable_jit_checkpoint": "use ec.StopSignals in a callback, which all ranks see at one step",
}


def refuse_arguments(args: Any, sharing: Sharing) -> None:
    """Raise for options of ``TrainingArguments`` that would be ignored or give wrong weights.

    Raises:
        UnsupportedError: names the option, its value and what to use instead.
    """
    refused = {name: reason for name, reason in _REASONS.items() if getattr(args, name, None)}
    optimizer = str(getattr(args.optim, "value", args.optim))
    if sharing.shards and optimizer not in _ELEMENTWISE:
        refused["optim"] = (
            f"it may need more of a parameter than a shard: use one of {sorted(_ELEMENTWISE)}"
        )
    if args.save_only_model and args.load_best_model_at_end:
        refused["save_only_model"] = "the best model is loaded from the training state"
    if sharing.num_stages > 1:
        refused |= _refused_in_stages(args)
    for name, reason in refused.items():
        value = getattr(args, name)
        raise UnsupportedError(f"TrainingArguments({name}={value!r:.80}): {reason}")


def _refused_in_stages(args: Any) -> dict[str, str]:
    reasons = {
        "neftune_noise_alpha": "only the first stage of a pipeline has the embedding",
        "predict_with_generate": "a stage cannot generate: call generate() of a model that has "
        "loaded save_model()'s folder",
        "batch_eval_metrics": "the logits of a pipeline are on one rank only",
        "torch_empty_cache_steps": "leave it out with plan.pp > 1",
    }
    refused = {name: reason for name, reason in reasons.items() if getattr(args, name, None)}
    if not args.average_tokens_across_devices:
        refused["average_tokens_across_devices"] = "microbatches are weighted by their tokens"
    return refused


def refuse_short_batch(loader: Any, microbatches: int, num_batches: int) -> None:
    """Raise if training gets to a last batch of an epoch that a pipeline cannot split.

    Args:
        loader: a ``DataLoader`` of the batches.
        microbatches: into how many parts each batch is split.
        num_batches: that training takes.

    Raises:
        ArgumentError: there will be such a batch.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> refuse_short_batch(DataLoader(range(11), 4), microbatches=3, num_batches=100)
        >>> refuse_short_batch(DataLoader(range(10), 4), microbatches=3, num_batches=2)
    """
    sampler = getattr(loader, "batch_sampler", None)
    # One of Accelerate's for several replicas fills the last batch up.
    if type(sampler) is not BatchSampler or sampler.drop_last or num_batches < len(sampler):
        return
    rows = len(sampler.sampler) % sampler.batch_size  # type: ignore[arg-type]
    if 0 < rows < microbatches:
        raise ArgumentError(
            f"the last batch of an epoch has {rows} of {sampler.batch_size} rows, too few for "
            f"microbatches={microbatches}: use dataloader_drop_last=True or fewer microbatches"
        )
