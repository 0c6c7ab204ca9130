"""Draws a case from a seed: a model, a program, a technique with its options, and a world."""

from __future__ import annotations

from tests.generated.operations import Spec
from tests.generated.thresholds import draw_thresholds
from tests.generated.trees import Dice, ModelDraw, has, walk
from tests.generated.values import VISIBLE

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD", "HYBRID_SHARD",
              "HYBRID_SHARD_ZERO2")  # fmt: skip
BLOCK = 100  # seeds with the same thresholds, which processes have from their start on
BACKWARDS = ("plain", "retain", "two_losses", "two_forwards", "interleaved", "reversed",
             "grad_first", "dropped", "eval_between", "inputs", "grad_only")  # fmt: skip


def draw_steps(dice: Dice, case: Spec) -> list[Spec]:
    """What each step of the program does."""
    fancy = dice.chance(0.6)
    steps = []
    for number in range(dice.choice((1, 2, 2, 3))):
        step: Spec = {}
        if fancy and dice.chance(0.6):
            step["backward"] = dice.choice(BACKWARDS)
        if dice.chance(0.2):
            step["micro"] = dice.choice((1, 2))
        if dice.chance(0.1):
            step["sync"] = "late"
        if dice.chance(0.15):
            step["eval"] = True
        if dice.chance(0.2):
            step["clip"] = dice.choice((0.05, 1.0, 100.0))
        if dice.chance(0.2):
            step["input"] = True  # needs a gradient
        if dice.chance(0.15):
            step["keep"] = True  # gradients go on to the next step
        if number and dice.chance(0.2):
            step["toggle"] = [dice.randrange(100) for _ in range(dice.choice((1, 1, 3)))]
        steps.append(step)
    return steps


def draw_fsdp(dice: Dice, case: Spec) -> Spec:
    """Options of ``FSDP``."""
    four = case["ranks"] == 4
    strategy = dice.choice(STRATEGIES if four else STRATEGIES[:4])
    if dice.chance(0.4):
        strategy = "FULL_SHARD"
    options: Spec = {"strategy": strategy}
    options["units"] = dice.choice(
        (
            "cell",
            "cell",
            "cell",
            "outer",
            "cell+outer",
            "cell+chain",
            "linear",
            "size1",
            "size9",
            "size30",
            "half",
            "every",
            "whole",
        )
    )
    if dice.chance(0.35):
        options["layout"] = "rows"
    if dice.chance(0.2):
        options["min_num_params"] = dice.choice((3, 8, 20, 1000))
    if dice.chance(0.3):
        options["backward_prefetch"] = dice.choice(("NONE", "PRE", "POST"))
    if dice.chance(0.3):
        options["forward_prefetch"] = dice.choice((1, 2, 5))
    if dice.chance(0.2):
        options["limit_all_gathers"] = False
    if dice.chance(0.2):
        options["use_orig_params"] = False
    if dice.chance(0.2):
        options["offload"] = dice.choice(("OPTIMIZER", "ALL"))
    if dice.chance(0.15):
        options["ignored"] = dice.choice(("module", "param"))
    if dice.chance(0.2):
        options["reduction"] = dice.choice(("sum", 3))
    if dice.chance(0.15):
        options["init"] = dice.choice(("verify", "trust"))
    if dice.chance(0.2):
        options["precision"] = dice.choice(PRECISIONS)
    if dice.chance(0.4):
        options["check_replicas"] = dice.choice((0, 1, 2, 3))
    return options


# By name of the dtype. Only "reduce" rounds: the others are what the parameters have.
PRECISIONS: tuple[Spec, ...] = (
    {"reduce": "float32"},
    {"reduce": "float64", "keep_low_precision_grads": True},
    {"master": "float64", "buffers": "float64"},
    {"compute": "float64", "keep": True},
)


def draw_ddp(dice: Dice, case: Spec) -> Spec:
    """Options of ``DDP``."""
    options: Spec = {"bucket_bytes": dice.choice((0, 1, 100, 300, 10**6))}
    if dice.chance(0.5):
        options["first_bucket_bytes"] = dice.choice((0, 50, 200))
    if dice.chance(0.3):
        options["sync"] = "manual"
    if dice.chance(0.3):
        options["reduction"] = dice.choice(("sum", 3))
    if dice.chance(0.15):
        options["init"] = dice.choice(("verify", "trust"))
    if dice.chance(0.3):
        options["broadcast_buffers"] = False
    if dice.chance(0.15):
        options["ignored"] = dice.choice(("module", "param"))
    if dice.chance(0.25):
        options["gradient_dtype"] = dice.choice(("float32", "float32", "float64"))
    if dice.chance(0.4):
        options["check_replicas"] = dice.choice((0, 1, 2, 3))
    return options


SCHEDULES = {
    1: ("gpipe", "1f1b", "zb-h1", "zb-h2"),
    2: ("interleaved", "looped-bfs", "zb", "zb-v", "v-half", "v-min", "dualpipe-v"),
}


def draw_pipeline(dice: Dice, case: Spec) -> Spec:
    """Options of ``Pipeline``, and the stages of the model."""
    replicas = case["ranks"] == 4 and dice.chance(0.6)
    pp = 2 if replicas else case["ranks"]
    options: Spec = {"pp": pp, "chunks": dice.choice((1, 1, 2))}
    if replicas:
        options["over"] = dice.choice(("dp", "shard"))
        if options["over"] == "shard":
            options["units"] = dice.choice(("cell", "whole", "every"))
            options["strategy"] = dice.choice(STRATEGIES[:3])
            if dice.chance(0.3):
                options["window_nbytes"] = dice.choice((0, 300))
        elif dice.chance(0.5):
            options["ddp"] = {"bucket_bytes": dice.choice((0, 100, 10**6))}
            options["ddp"]["check_replicas"] = dice.choice((0, 1, 64))
    options["schedule"] = dice.choice(SCHEDULES[options["chunks"]])
    m = dice.choice((1, 2, 3, 4, 5))
    case["rows"] = dice.choice((5, 6, 8))
    if options["schedule"] == "dualpipe-v":
        m = max(m, 2 * pp)
    options["microbatches"] = m
    case["rows"] = max(m, case["rows"])
    if dice.chance(0.3):
        options["recompute"] = True
    if replicas and dice.chance(0.3):
        options["reduce_every"] = "microbatch"
    if dice.chance(0.3):
        options["loss_reduction"] = "sum"
    if dice.chance(0.2):
        options["results_everywhere"] = True
    options |= draw_chunk_specs(Dice(f"extras {case['seed']}"))
    draw = ModelDraw(dice, staged=True)
    num_stages = pp * options["chunks"]
    stages = [{"kind": "chain", "children": [draw.tree(1) for _ in range(dice.choice((1, 2)))]}
              for _ in range(num_stages)]  # fmt: skip
    for stage in stages[:-1]:
        if dice.chance(0.3):
            stage["gives"] = dice.choice(VISIBLE[:4])  # a dataclass has to be registered
    case["model"] = {"kind": "chain", "children": stages}
    return options


def draw_chunk_specs(dice: Dice) -> Spec:
    """Further tensors of a batch: each microbatch gets its rows of one, or the whole.

    Their shapes do not say which, and neither do those of the input and target beside them.
    """
    kinds = ("whole", "rows")
    specs: Spec = {}
    if dice.chance(0.2):
        specs["args_chunk_spec"] = ["rows", dice.choice(kinds)]
    if dice.chance(0.2):
        specs["kwargs_chunk_spec"] = {"extra": dice.choice(kinds)}
        specs.setdefault("args_chunk_spec", ["rows"])
    if dice.chance(0.2):
        specs["target_chunk_spec"] = ["rows", dice.choice(kinds)]
    return specs


def draw_case(seed: int, technique: str | None = None, world: str = "threads") -> Spec:
    """The case of a seed: plain data.

    Args:
        technique: ``"fsdp"``, ``"ddp"`` or ``"pipeline"``; drawn if None.
    """
    dice = Dice(f"{seed} {technique}")
    case: Spec = {"seed": seed, "world": world}
    case["technique"] = technique or dice.weighted(fsdp=6, ddp=2, pipeline=2)
    case["ranks"] = dice.choice((2, 2, 2, 3, 4))
    case["values"] = dice.randrange(1000)
    if case["technique"] == "pipeline":
        case["ranks"] = dice.choice((2, 2, 3, 4, 4))
        case["options"] = draw_pipeline(dice, case)
        case["steps"] = [
            {k: v for k, v in step.items() if k in ("clip", "keep", "toggle", "eval")}
            for step in draw_steps(dice, case)
        ]
    else:
        case["model"] = ModelDraw(dice).whole()
        case["rows"] = dice.choice((1, 2, 3))
        if has(case["model"], "batchnorm"):
            case["rows"] = 3
        case["gives"] = dice.choice(("tensor", "tensor", "pair", *VISIBLE))
        case["steps"] = draw_steps(dice, case)
        make = draw_fsdp if case["technique"] == "fsdp" else draw_ddp
        case["options"] = make(dice, case)
    case["optimizer"] = dice.choice(("sgd", "adamw", "momentum"))
    if world == "threads" and Dice(f"{seed} rules").chance(0.3):
        case["rules"] = "nccl"
    case["thresholds"] = draw_thresholds(seed // BLOCK)
    if case["thresholds"]:
        for op in (op for part in walk(case["model"]) for op in part.get("ops", [])):
            if op["op"] == "large":
                op["numel"] = min(op["numel"], 2**10 + op["numel"] % 3)
    return settle(case)


def settle(case: Spec) -> Spec:
    """Take out what documentation says is not done, or what one process cannot be compared in."""
    options, model, steps = case["options"], case["model"], case["steps"]
    if case["technique"] == "fsdp":
        if options.get("use_orig_params") is False:
            case["optimizer"] = "sgd"  # a flat parameter has a gradient where one part has
            for step in steps:
                step.pop("toggle", None)  # parameters of two kinds would lie in one
                if step.get("backward") == "inputs":
                    step["backward"] = "plain"
            if options.get("layout") == "rows" and case["world"] != "gloo":
                options.pop("layout")  # UnsupportedError, tested elsewhere
        if options.get("strategy") == "NO_SHARD" and options.get("offload") == "ALL":
            options["offload"] = "OPTIMIZER"
        if "master" in options.get("precision", {}) and has(model, "float"):
            options.pop("precision")  # which makes float32 of other parameters float64
        strategy = options.get("strategy", "FULL_SHARD")
        inert = ["layout", "min_num_params", "forward_prefetch"] if strategy == "NO_SHARD" else []
        if strategy not in ("FULL_SHARD", "HYBRID_SHARD"):
            inert.append("backward_prefetch")
        for name in inert:
            options.pop(name, None)  # ArgumentError: there is nothing to decide
        if options.get("strategy", "").startswith("HYBRID") or case.get("rules"):
            # docs/fsdp-details.md, "Units that a rank skips": they would wait for slots; or gathers
            # and reductions, which have a communicator each, would not be in one order everywhere.
            for part in walk(model):
                if part.get("how") == "ranks":
                    part["how"] = "all"
    if case["technique"] == "ddp":
        settle_ddp(case)
    for part in walk(model):
        # docs/fsdp-details.md, "Units that a rank skips": none runs more often than on others.
        if part["kind"] == "twice" or has(part, "twice"):
            for inner in walk(part):
                if inner.get("how") == "ranks":
                    inner["how"] = "all"
    if case["world"] == "gloo" and has(model, "again"):
        # The same place: a module that is called again is not called in the order of the model's
        # modules, so in the first step no rank may leave units out.
        for part in walk(model):
            if part.get("how") == "ranks":
                part["how"] = "all"
    if has(model, "skips:ranks"):
        for step in steps:  # gradients of inputs that a rank has not used: nothing tells it
            if step.get("backward") == "inputs":
                step["backward"] = "plain"
    if options.get("ignored"):
        for step in steps:
            step.pop("clip", None)  # whose norm nobody could say
    if (
        has(model, "attention", "gru", "embedding", "border:inplace_view_out")
        and case["technique"] == "pipeline"
    ):
        for step in steps:
            step.pop("eval", None)  # a batch of evaluation is cut in another way
    return case


def settle_ddp(case: Spec) -> None:
    """What DDP does otherwise than one process, by its documentation."""
    options, steps = case["options"], case["steps"]
    if options.get("sync") == "manual":
        for step in steps:
            step.pop("sync", None)
            step["backward"] = step.get("backward", "plain")
    moves = has(case["model"], "batchnorm", "buffer")
    if moves and options.get("broadcast_buffers", True):
        for step in steps:  # when buffers are sent depends on when gradients are reduced
            for key in ("backward", "micro", "sync", "eval"):
                step.pop(key, None)
