"""Which optimizers train under FSDP what they train in one process, and which are refused.

Every optimizer class of the packages that are installed trains a small model in one process and
under FSDP, in each layout, on two and three simulated ranks. The weights are equal, or the first
step is refused with the name of the class and the reason; a third outcome is a defect. Each class
is tried in a process of its own, with a limit of time and memory.

    python benchmarks/optimizers.py [--packages torch.optim,pytorch_optimizer] [--json FILE]
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import inspect
import json
import multiprocessing
import pkgutil
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

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
STEPS = 33
SECONDS, NBYTES = 60, 8 << 30  # of one class
LAYOUTS = {"flat": {}, "rows": {"layout": "rows"}, "flat parameters": {"use_orig_params": False}}
TOLERANCE = 1e-9  # in float64; optimizers that compute in float32 have their own rounding
ROUNDING = 1e-4


def modules_of(package: str) -> list[ModuleType]:
    """A package and all modules in it whose needs are installed."""
    modules = []
    try:
        modules.append(importlib.import_module(package))
        path = getattr(modules[0], "__path__", [])
        names = [m.name for m in pkgutil.walk_packages(path, f"{package}.", lambda name: None)]
    except (Exception, SystemExit) as error:
        print(f"{package}: {type(error).__name__}: {error!s:.80}", file=sys.stderr)
        return modules
    for name in names:
        if "test" not in name:
            with suppress(Exception, SystemExit):  # what the module needs is not installed
                modules.append(importlib.import_module(name))
    return modules


def classes(packages: tuple[str, ...]) -> Iterator[tuple[str, type[Optimizer]]]:
    """Every optimizer class of each package once, with the name of the package."""
    seen: set[type] = set()
    for package in packages:
        with redirect_stdout(StringIO()):
            modules = modules_of(package)
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


def make_optimizer(cls: type[Optimizer], model: nn.Module) -> Optimizer:
    params = list(model.parameters())
    takes_matrices = "uon" in cls.__name__ or "Scion" in cls.__name__
    matrices = [param for param in params if param.dim() == 2] or params
    if cls is torch.optim.Muon:
        params = matrices
    attempts: list[Callable[[], Optimizer]] = [
        lambda: cls(params, lr=RATE),
        lambda: cls(params),
        lambda: cls(torch.optim.SGD(params, lr=RATE)),
        lambda: cls(params, torch.optim.SGD, lr=RATE),
        lambda: cls(params, torch.optim.SGD(params, lr=RATE)),
        lambda: cls(params, num_iterations=100),
        lambda: cls(params, num_data=1000),
        lambda: cls(params, ess=1000.0),
        lambda: cls(model.named_parameters(), lr=RATE),
        lambda: cls(model.named_parameters()),
        lambda: cls(model, lr=RATE),
        lambda: cls(model),
    ]
    if takes_matrices:
        grouped = [
            {"params": matrices, "use_muon": True},
            {"params": [p for p in params if p.dim() != matrices[0].dim()], "use_muon": False},
        ]
        attempts.insert(0, lambda: cls(grouped))
    errors = []
    for attempt in attempts:
        try:
            return attempt()
        except Exception as error:
            errors.append(error)
    raise errors[0]


def train(
    world: ec.World | None,
    cls: type[Optimizer],
    dtype: torch.dtype,
    layout: str,
    closures: str,
    made: list[Optimizer] | None = None,
) -> Any:
    torch.manual_seed(0)
    model = make_model(dtype)
    rows = slice(None)
    if world is not None:
        model = ec.FSDP(model, world.group, min_num_params=0, **LAYOUTS[layout])
        rows = slice(world.rank, None, world.size)
    try:
        optimizer = make_optimizer(cls, model)
    except ValueError as error:
        raise UnsupportedError(f"{cls.__name__} itself looks at {error}") from error
    if made is not None:
        made.append(optimizer)
    if hasattr(optimizer, "train") and callable(optimizer.train):
        optimizer.train()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(12, 132, dtype=dtype, generator=generator)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x[rows]).square().mean()
            loss.backward()
            return loss

        closure()
        if closures == "all" or (closures == "some" and step % 2):
            optimizer.step(closure)
        else:
            optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


Alone = tuple[dict[str, Tensor], torch.dtype, str, bool]


def alone(cls: type[Optimizer]) -> Alone | str:
    """The weights of one process, and how it got them; what went wrong if it cannot train.

    The last value says whether the optimizer computes in float32, whatever the weights are.
    """
    error: Exception | None = None
    for closures in ("some", "none", "all"):
        for dtype in (torch.float64, torch.float32):
            try:
                made: list[Optimizer] = []
                expected = train(None, cls, dtype, "flat", closures, made)
                again = train(None, cls, dtype, "flat", closures)
            except Exception as caught:
                error = error or caught
                continue
            if any(not value.isfinite().all() for value in expected.values()):
                return "not finite"
            torch.manual_seed(0)
            start = make_model(dtype).state_dict()
            if all(torch.equal(start[name], value) for name, value in expected.items()):
                return "changes nothing"
            same = all(torch.equal(again[name], value) for name, value in expected.items())
            single = dtype is torch.float32 or _keeps_float32(made[0])
            return (expected, dtype, closures, single) if same else "two runs of one process differ"
    return f"{type(error).__name__}: {error}"[:100].replace("\n", " ")


def outcome(cls: type[Optimizer], layout: str, ranks: int, alone: Alone) -> str:
    expected, dtype, closures, single = alone
    try:
        found = ec.run(train, ranks, args=(cls, dtype, layout, closures), timeout=120)[0]
    except UnsupportedError as error:
        reason = str(error).partition(" looks at ")[2].partition(", and ")[0]
        return f"refused: {reason}" if reason else f"REFUSED BY {error!s:.200}"
    except Exception as error:
        return f"ERROR {type(error).__name__}: {error!s:.160}".replace("\n", " ")
    worst = max(
        ((found[k] - v).abs().max() / v.abs().max().clamp(min=1e-30)).item()
        for k, v in expected.items()
    )
    if worst <= TOLERANCE:
        return "equal"
    # What computes in float32 inside has its rounding in all layouts.
    return f"equal to {worst:.0e}" if worst <= ROUNDING and single else f"WRONG {worst:.1e}"


def _keeps_float32(optimizer: Optimizer) -> bool:
    """Whether a state of more than one element has float32, as for weights of half precision."""
    states = pytree.tree_leaves(dict(optimizer.state))
    return any(
        isinstance(state, Tensor) and state.numel() > 1 and state.dtype is torch.float32
        for state in states
    )


def try_class(cls: type[Optimizer], layouts: list[str], send: Any) -> None:
    """Send the outcomes by layout and number of ranks, or why it does not train by itself."""
    resource.setrlimit(resource.RLIMIT_AS, (NBYTES, NBYTES))
    faulthandler.dump_traceback_later(2 * SECONDS - 10)
    warnings.simplefilter("ignore")
    with redirect_stdout(StringIO()):
        result = alone(cls)
        send.send(None)
        if not isinstance(result, str):
            expected = result
            result = {
                f"{layout} {ranks}": outcome(cls, layout, ranks, expected)
                for layout in layouts
                for ranks in (2, 3)
            }
    send.send(result)


def outcomes(cls: type[Optimizer], layouts: list[str]) -> dict[str, str] | str:
    """What ``try_class`` sends, from a process that ends when its time is over."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=try_class, args=(cls, layouts, send))
    process.start()
    send.close()
    try:
        if not receive.poll(SECONDS):
            return f"not done after {SECONDS} s"
        receive.recv()
        return receive.recv() if receive.poll(SECONDS) else {"any": "ERROR not done"}
    except EOFError:
        process.join()
        return {"any": f"ERROR its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packages", default=",".join(PACKAGES), help="comma-separated")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="comma-separated")
    parser.add_argument("--only", default="", help="names of classes, comma-separated")
    parser.add_argument("--json", help="write the outcomes there, and skip classes it has")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    table: dict[str, Any] = {}
    if args.json and Path(args.json).exists():
        table = json.loads(Path(args.json).read_text())
    for package, cls in classes(tuple(args.packages.split(","))):
        if args.only and cls.__name__ not in args.only.split(","):
            continue
        name = f"{package}.{cls.__name__}"
        if name in table:
            continue
        table[name] = row = outcomes(cls, args.layouts.split(","))
        if isinstance(row, str):
            print(f"{name:60} does not train alone: {row}", flush=True)
        else:
            print(f"{name:60} " + "; ".join(f"{k}: {v}" for k, v in row.items()), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(table, indent=1))
    rows = [row for row in table.values() if not isinstance(row, str)]
    counts = Counter(v.partition(" ")[0].rstrip(":") for row in rows for v in row.values())
    print(f"{len(rows)} classes, {len(table) - len(rows)} do not train alone; {dict(counts)}")


if __name__ == "__main__":
    main()
