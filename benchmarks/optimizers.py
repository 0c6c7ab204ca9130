"""Which optimizers train under FSDP what they train in one process, and which are refused.

Every optimizer class of the packages that are installed trains a small model in one process and
under FSDP, in each layout, on two and three simulated ranks. The weights are equal, or the first
step is refused with the name of the class and the reason; a third outcome is a defect.

    python benchmarks/optimizers.py [--packages torch.optim,pytorch_optimizer] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import echelon as ec
from echelon.errors import UnsupportedError

PACKAGES = (
    "torch.optim", "pytorch_optimizer", "torch_optimizer", "schedulefree", "heavyball",
    "lion_pytorch", "adan_pytorch", "prodigyopt", "prodigyplus", "dadaptation", "came_pytorch",
    "galore_torch", "adabelief_pytorch", "ranger_adabelief", "madgrad", "muon", "sophia",
    "pytorch_lamb", "fromage", "adamp", "sam", "kron_torch", "adam_mini", "timm.optim",
    "bitsandbytes.optim", "torchao.optim", "transformers.optimization",
)  # fmt: skip
RATE = 0.01
STEPS = 11
TOLERANCE = 1e-9  # in float64; optimizers that compute in float32 have their own rounding
ROUNDING = 1e-4


def classes(packages: tuple[str, ...]) -> Iterator[tuple[str, type[Optimizer]]]:
    """Every optimizer class of each package once, with the name of the package."""
    seen: set[type] = set()
    for package in packages:
        try:
            with redirect_stdout(StringIO()):
                root = importlib.import_module(package)
                modules = [root]
                for info in pkgutil.walk_packages(getattr(root, "__path__", []), f"{package}."):
                    if "test" not in info.name:
                        modules.append(importlib.import_module(info.name))
        except Exception as error:
            print(f"{package}: {type(error).__name__}: {error!s:.80}")
            if package not in str(error):
                modules = [root]
            else:
                continue
        for module in modules:
            for cls in list(vars(module).values()):
                ours = inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
                name = getattr(cls, "__module__", "").partition(".")[0]
                if (
                    ours
                    and cls.__name__ != "NewCls"
                    and name == package.partition(".")[0]
                    and cls not in seen
                ):
                    seen.add(cls)
                    yield package, cls


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(132, 160), nn.LayerNorm(160), nn.Tanh(), nn.Linear(160, 6)).to(
        dtype
    )


def make_optimizer(cls: type[Optimizer], params: list[nn.Parameter]) -> Optimizer:
    matrices = "uon" in cls.__name__ or "Scion" in cls.__name__
    if cls is torch.optim.Muon:
        params = [param for param in params if param.dim() == 2]
    attempts: list[Callable[[], Optimizer]] = [
        lambda: cls(params, lr=RATE),
        lambda: cls(params),
        lambda: cls(torch.optim.SGD(params, lr=RATE)),
        lambda: cls(params, torch.optim.SGD, lr=RATE),
        lambda: cls(params, num_iterations=100),
    ]
    if matrices:
        grouped = [
            {"params": [p for p in params if p.dim() == 2], "use_muon": True},
            {"params": [p for p in params if p.dim() != 2], "use_muon": False},
        ]
        attempts.insert(0, lambda: cls(grouped))
    errors = []
    for attempt in attempts:
        try:
            return attempt()
        except Exception as error:
            errors.append(error)
    raise errors[0]


def train(world: ec.World | None, cls: type[Optimizer], dtype: torch.dtype, layout: str) -> Any:
    torch.manual_seed(0)
    model = make_model(dtype)
    rows = slice(None)
    if world is not None:
        model = ec.FSDP(model, world.group, min_num_params=0, layout=layout)
        rows = slice(world.rank, None, world.size)
    optimizer = make_optimizer(cls, list(model.parameters()))
    if hasattr(optimizer, "train") and callable(optimizer.train):
        optimizer.train()
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(12, 132, dtype=dtype, generator=generator)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x[rows]).square().mean()
            loss.backward()
            return loss

        closure()
        needs = inspect.signature(type(optimizer).step).parameters.get("closure")
        if needs is not None and needs.default is inspect.Parameter.empty:
            optimizer.step(closure)
        else:
            optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def alone(cls: type[Optimizer]) -> tuple[dict[str, Tensor], torch.dtype] | str:
    """The weights of one process; what went wrong if it cannot train."""
    error: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            expected = train(None, cls, dtype, "flat")
            again = train(None, cls, dtype, "flat")
        except Exception as caught:
            error = error or caught
            continue
        if any(not value.isfinite().all() for value in expected.values()):
            return "not finite"
        same = all(torch.equal(again[name], value) for name, value in expected.items())
        return (expected, dtype) if same else "two runs of one process differ"
    return f"{type(error).__name__}: {error}"[:100].replace("\n", " ")


def outcome(cls: type[Optimizer], layout: str, ranks: int, expected: Any, dtype: Any) -> str:
    try:
        found = ec.run(train, ranks, args=(cls, dtype, layout), timeout=120)[0]
    except UnsupportedError as error:
        named = cls.__name__ in str(error) or "a step of" in str(error)
        return "refused" if named else f"REFUSED BY {error!s:.80}"
    except Exception as error:
        return f"ERROR {type(error).__name__}: {error!s:.160}".replace("\n", " ")
    worst = max(
        ((found[k] - v).abs().max() / v.abs().max().clamp(min=1e-30)).item()
        for k, v in expected.items()
    )
    if worst <= TOLERANCE:
        return "equal"
    # What computes in float32 inside has its rounding in all layouts.
    return (
        f"equal to {worst:.0e}" if worst <= ROUNDING and _single(expected) else f"WRONG {worst:.1e}"
    )


def _single(expected: dict[str, Tensor]) -> bool:
    return any(value.dtype == torch.float32 for value in expected.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packages", default=",".join(PACKAGES), help="comma-separated")
    parser.add_argument("--layouts", default="flat,rows", help="comma-separated")
    parser.add_argument("--only", default="", help="names of classes, comma-separated")
    parser.add_argument("--json", help="write the outcomes there")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    table: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for package, cls in classes(tuple(args.packages.split(","))):
        if args.only and cls.__name__ not in args.only.split(","):
            continue
        name = f"{package}.{cls.__name__}"
        with redirect_stdout(StringIO()):
            expected = alone(cls)
        if isinstance(expected, str):
            counts["not tried: it does not train this model in one process"] += 1
            table[name] = expected
            print(f"{name:60} does not train alone: {expected}", flush=True)
            continue
        row = []
        for layout in args.layouts.split(","):
            for ranks in (2, 3):
                with redirect_stdout(StringIO()):
                    result = outcome(cls, layout, ranks, *expected)
                row.append(f"{layout} {ranks}: {result}")
                counts[result.partition(" ")[0]] += 1
        table[name] = row
        print(f"{name:60} " + "; ".join(row), flush=True)
    print(f"{len(table)} classes; {dict(counts)}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
