"""Whether an optimizer trains the same model where it sees parts of it: it is tried on small ones.

::

    whole   step step step ...        w 160 x 132, b 132, ...        what one process does
    parts   step step step ...        w[:61]                         what one rank sees,
            step step step ...        w[61:], b[:50]                 and what another sees

The optimizer is copied twice or more over small tensors, and steps with the same gradients. If what
it makes of the parts, and keeps of them, is what it makes of the whole, each element is updated by
itself, or as far as the cut is concerned; then it may train shards. Otherwise it takes norms of
whole tensors, their columns, dot products over all parameters, the loss or random numbers, and
would train another model.

It is tried for a few steps, which find what looks at all parameters; much of that keeps long
histories. All others are tried twice: for many steps on tiny tensors, where nothing is slow or
large, then on tensors as large as the thresholds of optimizers ask for. Some factor a moment from
128 rows on, some quantise from 4,096 elements on, some look at the whole every tenth step.
Gradients and values of the parts differ by orders of magnitude, so that what is combined differs,
too.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from echelon.modules.optimizer_memory import Memory, keep_states, optimizers_in
from echelon.process.background_threads import run_in_background

# Of the gradients by step, and backwards for later parts: what looks at the largest or the mean so
# far finds other ones in each part. All have a direction in common, which rates that grow follow.
_LOUDNESS = (1.0, 30.0, 0.03, 3.0, 100.0, 0.01, 0.3, 10.0, 0.001, 1.0, 50.0, 0.1)
_Shapes = dict[int, tuple[int, ...]]
_LARGE: _Shapes = {0: (), 1: (132,), 2: (160, 132), 3: (8, 5, 9), 4: (8, 5, 3, 3)}
_TINY: _Shapes = {0: (), 1: (9,), 2: (8, 6), 3: (5, 3, 2), 4: (5, 3, 2, 2)}
_SECOND: _Shapes = {0: (), 1: (7,), 2: (6, 4), 3: (4, 3, 2), 4: (4, 3, 2, 2)}
# Of the trial with each size of the first stand-in.
_STEPS = ((_TINY, 32), (_LARGE, len(_LOUDNESS)))
_FIRST_STEPS = 4  # of a trial that finds what looks at all parameters, without a long history
_SHARE = 0.38  # of the first part: no multiple of anything
# Of what a tensor has moved. What takes each element by itself has the same bits, but for functions
# whose vectorised form rounds otherwise than that of the last few elements.
_TOLERANCE = 1e-9
_LR = 1e-3
_COSINE = 2e-4
_DECAY = 0.01  # of the gradient that each evaluation of a closure computes anew

# Exactly these classes of torch are known to take each element by itself, and need no trial.
KNOWN = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam),
        *(torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta),
        *(torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Rprop),
    }
)


# A reason that holds for whole models, too.
LOSS = "the loss that its closure returns, which each rank has of its own samples"
# More than this no step can look at.
_ALL = "all parameters of the model at once"


class Cut(Enum):
    """What of a model the optimizer of one rank sees."""

    ROWS = "some rows of each tensor"
    ELEMENTS = "some elements of each tensor, in one dim"
    FLAT = "some elements of all tensors together, in one dim"
    ONE_FLAT = "all tensors together, in one dim"
    PARAMETERS = "some of the tensors"


class _Closures(Enum):
    """Which steps get a closure. What a rank returns there is the loss of its own rows."""

    NEVER = "no step"
    OFTEN = "every other step"
    ALWAYS = "each step"


@final
@dataclass(frozen=True, slots=True)
class _Piece:
    """What an optimizer sees as one parameter: some elements of all stand-ins end to end."""

    elements: Tensor
    shape: tuple[int, ...]


# Of one rank, by group of the optimizer.
_Part = list[list[_Piece]]


def why_parts_differ(optimizer: Optimizer, cut: Cut) -> str | None:
    """What the steps of ``optimizer`` look at that is not in its part; None if there is nothing.

    Nothing of ``optimizer`` changes. The result depends on its class, its groups and their
    hyperparameters only, so ranks with equal ones get the same. It takes 30 to 1,000 ms.
    """
    if type(optimizer) in KNOWN:
        return None
    key, verdict = _key(optimizer, cut), Future[str | None]()
    if key is not None:
        if len(_verdicts) >= _MAX_VERDICTS:
            _verdicts.clear()
        if (known := _verdicts.setdefault(key, verdict)) is not verdict:
            return known.result()  # which another simulated rank may still be finding
    # Hooks on all optimizers, such as those that count steps, ask whose thread they are on.
    run_in_background(
        "trial of an optimizer", lambda: verdict.set_result(_tried(optimizer, cut))
    ).join()
    return verdict.result()


def _tried(optimizer: Optimizer, cut: Cut) -> str | None:
    try:
        first = _Trial(optimizer, cut, _TINY, _FIRST_STEPS).reason()
        if first is not None and first.startswith(_ALL):
            return first
        reasons = (_Trial(optimizer, cut, *size).reason() for size in _STEPS)
        return next((reason for reason in reasons if reason), None)
    except Exception as error:
        return f"something that could not be tried ({_said(error)})"


# By what a result depends on: simulated ranks have equal optimizers in one process.
_verdicts: dict[Hashable, Future[str | None]] = {}
_MAX_VERDICTS = 100


def _key(optimizer: Optimizer, cut: Cut) -> Hashable | None:
    """What the result depends on; None if that is more than numbers, texts and its parameters."""
    skipped = ("param_groups", "state", "step", "zero_grad")
    values: list[Any] = [
        (name, value)
        for name, value in vars(optimizer).items()
        if name not in skipped and not name.startswith("_optimizer_")
    ]
    params: list[Any] = []
    for group in optimizer.param_groups:
        values += [(name, value) for name, value in group.items() if name != "params"]
        values.append("the next group")
        params.append(tuple((param.dim(), param.device) for param in group["params"]))
    every = (param for group in optimizer.param_groups for param in group["params"])
    values = _by_number(values, {id(param): f"parameter {i}" for i, param in enumerate(every)})
    if optimizer.state or not _is_plain(values):
        return None
    return type(optimizer), cut, repr(values), tuple(params)


def _by_number(value: Any, numbers: Mapping[int, str]) -> Any:
    """``value`` with the number of each parameter in place of it, as in lists that LBFGS keeps."""
    if isinstance(value, dict):
        return {key: _by_number(inner, numbers) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_by_number(inner, numbers) for inner in value)
    return numbers.get(id(value), value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_plain(list(value.items()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


@final
class _Trial:
    """Trains copies of one optimizer on stand-ins of its parameters.

    ``_kept`` has, by group, the parameters that have a stand-in, and ``_whole`` all stand-ins.
    """

    def __init__(self, optimizer: Optimizer, cut: Cut, by_dims: _Shapes, num_steps: int) -> None:
        self._optimizer, self._cut = optimizer, cut
        self._kept: list[list[nn.Parameter | None]] = []
        self._whole: _Part = []
        self._numel = 0
        for group in optimizer.param_groups:
            kept, shapes = _representatives(group["params"], by_dims)
            if kept and cut in (Cut.FLAT, Cut.ONE_FLAT):
                # What is shown in one dim may have any number of dims.
                kept = [kept[0], group["params"][1] if len(group["params"]) > 1 else None]
                shapes = [by_dims[2], by_dims[1]]
            self._kept.append(kept)
            self._whole.append([])
            for shape in shapes:
                start, self._numel = self._numel, self._numel + math.prod(shape)
                self._whole[-1].append(
                    _Piece(torch.arange(start, self._numel, device="cpu"), shape)
                )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._device = params[0].device if params else torch.device("cpu")
        generator = torch.Generator().manual_seed(0)
        # Elements of later parts are larger, and their gradients smaller.
        scale = torch.ones(self._numel, dtype=torch.float64, device="cpu")
        for cut in (Cut.ROWS, Cut.ELEMENTS, Cut.FLAT, Cut.PARAMETERS):
            for pieces in self._parts(cut)[1]:
                for piece in pieces:
                    scale[piece.elements] *= 3.0
        values = torch.randn(self._numel, generator=generator, dtype=torch.float64, device="cpu")
        self._values = values * scale
        later = scale > 1
        drift = 3 * torch.randn(self._numel, generator=generator, dtype=torch.float64, device="cpu")
        loudness = [_LOUDNESS[i % len(_LOUDNESS)] for i in range(num_steps)]
        self._gradients = [
            (
                torch.randn(self._numel, generator=generator, dtype=torch.float64, device="cpu")
                * torch.where(later, second, first)
                + drift
            )
            / scale**2
            for first, second in zip(loudness, reversed(loudness), strict=True)
        ]

    def reason(self) -> str | None:
        """Why the parts become something else than the whole; None if they do not."""
        if not self._numel:
            return None
        state = torch.default_generator.get_state()
        try:
            return self._reason()
        finally:
            torch.default_generator.set_state(state)

    def _reason(self) -> str | None:
        try:
            values, memory = self._expected = self._first()
        except Exception as error:
            return f"something that could not be tried on small tensors ({_said(error)})"
        if torch.equal(values, self._values):
            return "something that could not be tried: a trial of some steps changed nothing"
        try:
            difference = self._difference(self._cut)
        except Exception as error:
            return f"whole tensors, and fails on parts of them ({_said(error)})"
        if difference is None:
            return None
        again, kept = self._train(self._whole, seed=1)
        if not torch.equal(again, values) or memory.difference(kept, self._numel) is not None:
            return "random numbers, which are other ones for a part"
        if self._is_equal(self._cut, losses=False):
            return LOSS
        if not self._is_equal(Cut.PARAMETERS, losses=False):
            return _ALL + difference
        by_rows = self._is_equal(Cut.ROWS, losses=False)
        return ("whole rows of matrices" if by_rows else "whole tensors") + difference

    def _first(self) -> tuple[Tensor, Memory]:
        """What becomes of the whole, stepped in the first way in which that can be done."""
        errors = []
        for with_state, closures in product((False, True), _ways(self._optimizer)):
            self._with_state, self._closures = with_state, closures
            try:
                return self._train(self._whole, turns=True)
            except Exception as error:
                errors.append(error)
        raise errors[0]

    def _is_equal(self, cut: Cut, *, losses: bool) -> bool:
        try:
            return self._difference(cut, losses=losses) is None
        except Exception:
            return False  # it is refused already; this only finds the words

    def _difference(self, cut: Cut, *, losses: bool = True) -> str | None:
        """Which number differs, if a part becomes or keeps something else; "" for weights."""
        values, memory = self._expected
        is_cut = cut is not Cut.ONE_FLAT  # there the rank has all of them, in another shape
        for part in self._parts(cut):
            trained, kept = self._train(part, losses=losses and is_cut)
            for piece in (piece for pieces in part for piece in pieces):
                at = piece.elements
                moved = (values[at] - self._values[at]).abs().max().item() if len(at) else 0.0
                largest = self._values[at].abs().max().item() if len(at) else 0.0
                error = (trained[at] - values[at]).abs().max().item() if len(at) else 0.0
                if not error <= _TOLERANCE * moved + 1e-14 * largest:
                    return ""
            name = memory.difference(kept, self._numel) if is_cut else None
            if name is not None:
                return f", of which it keeps {name}"
        return None

    # Cuts ------------------------------------------------------------------------------------

    def _parts(self, cut: Cut) -> list[_Part]:
        """What each of one or two ranks sees."""
        if cut in (Cut.FLAT, Cut.ONE_FLAT):
            nothing = torch.zeros(0, dtype=torch.long, device="cpu")
            flat = [torch.cat([nothing, *(p.elements for p in group)]) for group in self._whole]
            ends = [[0, round(_SHARE * len(f)), len(f)] for f in flat]
            if cut is Cut.ONE_FLAT:
                return [[[_piece(elements)] for elements in flat]]
            return [
                [[_piece(f[end[k] : end[k + 1]])] for f, end in zip(flat, ends, strict=True)]
                for k in range(2)
            ]
        if cut is Cut.PARAMETERS:
            return [
                [
                    [piece for i, piece in enumerate(group) if (i + g) % 2 == k]
                    for g, group in enumerate(self._whole)
                ]
                for k in range(2)
            ]
        split = _split_rows if cut is Cut.ROWS else _split_elements
        return [[[split(piece)[k] for piece in group] for group in self._whole] for k in range(2)]

    # Training --------------------------------------------------------------------------------

    def _train(
        self, part: _Part, *, seed: int = 0, turns: bool = False, losses: bool = False
    ) -> tuple[Tensor, Memory]:
        """The values of all stand-ins after steps over those of ``part``, and what is kept then.

        With ``turns``, every third gradient becomes almost orthogonal to its tensor, here and in
        later runs, as where a norm follows the weights: some optimizers look for that. With
        ``losses``, closures return what another rank has.
        """
        torch.default_generator.manual_seed(seed)
        params = [
            [
                nn.Parameter(self._values[piece.elements].view(piece.shape).to(self._device))
                for piece in pieces
            ]
            for pieces in part
        ]
        optimizer = self._copy(params)
        pairs = [
            (param, piece)
            for ours, pieces in zip(params, part, strict=True)
            for param, piece in zip(ours, pieces, strict=True)
        ]
        for step, gradients in enumerate(self._gradients):
            loss = torch.tensor(
                (1.7 if losses else 1.0) / (step + 1), dtype=torch.float64, device="cpu"
            )

            def closure(gradients: Tensor = gradients, loss: Tensor = loss) -> Tensor:
                for param, piece in pairs:
                    gradient = gradients[piece.elements].view(piece.shape).to(param)
                    param.grad = gradient + _DECAY * param.detach()
                return loss.clone().requires_grad_()

            if turns and step % 3 == 2:
                for param, piece in pairs:
                    _turn(gradients, param, piece)
            with torch.enable_grad():
                closure()
            if self._closures is _Closures.ALWAYS or (
                self._closures is _Closures.OFTEN and step % 2
            ):
                optimizer.step(closure)  # type: ignore[arg-type]  # torch takes tensors, too
            else:
                optimizer.step()
        result = self._values.clone()
        for param, piece in pairs:
            result[piece.elements] = param.detach().reshape(-1).to(result)
        kept = [(param, piece.elements, piece.shape) for param, piece in pairs]
        return result, Memory(optimizer, kept)

    def _copy(self, params: list[list[nn.Parameter]]) -> Optimizer:
        """A copy of the optimizer over ``params``, by group, without a state if possible."""
        memo: dict[int, Any] = {}
        groups = self._optimizer.param_groups
        for group in groups:
            for param in group["params"]:
                memo[id(param)] = nn.Parameter(torch.empty(0, device="cpu"))
        stand_ins: list[list[tuple[nn.Parameter, nn.Parameter]]] = []
        for group, kept, ours in zip(groups, self._kept, params, strict=True):
            # In a part there may be fewer, such as one flat parameter.
            pairs = list(zip(kept, ours, strict=False))
            memo.update((id(kept), param) for kept, param in pairs if kept is not None)
            originals = group["params"]
            stand_ins.append([(k if k is not None else originals[0], p) for k, p in pairs])
        if self._with_state:
            keep_states(self._optimizer, [group["params"] for group in groups], stand_ins, memo)
        clone = _copy_optimizer(self._optimizer, memo)
        for group, ours in zip(clone.param_groups, params, strict=True):
            group["params"][:] = ours  # the same list may be known by other names
            if "lr" in group and float(group["lr"]) == 0:  # the first step of a warm-up
                usual = group.get("initial_lr") or self._optimizer.defaults.get("lr") or _LR
                group["lr"] = group["lr"] * 0 + usual
        return clone


def _turn(gradients: Tensor, param: nn.Parameter, piece: _Piece) -> None:
    """Make the gradient of a tensor almost orthogonal to it."""
    value = param.detach().reshape(-1).to(gradients)
    at, square = piece.elements, value.dot(value).clamp(min=1e-30)
    gradients[at] -= (gradients[at].dot(value) / square + _DECAY) * value
    gradients[at] += _COSINE * gradients[at].norm() / square.sqrt() * value


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy with all attributes, which ``copy.deepcopy`` would leave out."""
    clone = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = clone
    for value in vars(optimizer).values():
        for inner in optimizers_in(value):
            if id(inner) not in memo:
                _copy_optimizer(inner, memo)
        if isinstance(value, nn.Module):
            raise TypeError("it refers to a module")
    attributes = vars(clone)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            attributes[name] = OrderedDict()  # hooks of users
        elif name == "state" and isinstance(value, dict):
            attributes[name] = memo.setdefault(id(value), defaultdict(dict))
        elif name not in ("step", "zero_grad"):  # which others have replaced, such as schedulers
            attributes[name] = copy.deepcopy(value, memo)
    return clone


def _representatives(
    params: Sequence[nn.Parameter], by_dims: _Shapes
) -> tuple[list[nn.Parameter | None], list[tuple[int, ...]]]:
    """One parameter for each number of dims, and two where that is possible; their stand-ins.

    A single parameter gets a second stand-in, which is there for nobody.
    """
    kept: list[nn.Parameter | None] = []
    shapes: list[tuple[int, ...]] = []
    for number, of_dims in enumerate((by_dims, _SECOND)):
        seen: dict[int, int] = {}
        for param in params:
            dims = param.dim()
            seen[dims] = seen.get(dims, 0) + 1
            if seen[dims] == number + 1:
                kept.append(param)
                shapes.append(of_dims.get(dims, (2,) * dims))
    if len(kept) == 1:
        kept.append(None)
        dims = len(shapes[0])
        shapes.append(_SECOND.get(dims, (2,) * dims))
    return kept, shapes


def _piece(elements: Tensor) -> _Piece:
    return _Piece(elements, (len(elements),))


def _split_rows(whole: _Piece) -> list[_Piece]:
    elements, shape = whole.elements, whole.shape
    if not shape:
        return [whole, _piece(elements[:0])]
    rows = round(_SHARE * shape[0])
    by_row = elements.view(shape[0], -1)
    return [
        _Piece(part.reshape(-1), (len(part), *shape[1:])) for part in (by_row[:rows], by_row[rows:])
    ]


def _split_elements(whole: _Piece) -> list[_Piece]:
    elements = whole.elements
    # Flat layouts give small parameters to one rank.
    end = 0 if len(whole.shape) == 1 else round(_SHARE * len(elements))
    return [_piece(elements[:end]), _piece(elements[end:])]


def _ways(optimizer: Optimizer) -> tuple[_Closures, ...]:
    """How steps may be called; what raises is tried in the next way."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None:
        return (_Closures.NEVER, _Closures.ALWAYS)
    if closure.default is inspect.Parameter.empty:
        return (_Closures.ALWAYS,)
    return (_Closures.OFTEN, _Closures.NEVER, _Closures.ALWAYS)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error) or 'no text'}"[:200].replace("\n", " ")
