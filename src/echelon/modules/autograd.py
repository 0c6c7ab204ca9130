"""What autograd's engine does now, a callback at the end of backward, and adding to ``.grad``.

[Note: accumulation in place]
Usually the gradient of a later microbatch is computed into memory of its own and then added, which
writes and reads as many bytes as the weight has, three times more. For a linear layer the
multiplication itself can add the product (``addmm_``; Megatron-LM has a kernel for it, "gradient
accumulation fusion"). For an embedding only the rows that were looked up need to be touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@final
class Token:
    """An object that lives as long as one backward.

    The callback that the engine calls at the end owns it, and the engine drops the callback when
    backward raises. So a dead token shows that a backward is over, also when it was aborted.
    """

    __slots__ = ("__weakref__",)


@contextmanager
def token_of_body(
    died: Callable[[weakref.ref[Token]], None] | None = None,
) -> Iterator[weakref.ref[Token]]:
    """A weak reference to a token that dies with the body, also where the body raises.

    ``died`` is called with it then, as long as somebody has it.

    Example:
        >>> with token_of_body() as token:
        ...     token() is None
        False
        >>> token() is None
        True
    """
    tokens = [Token()]
    try:
        yield weakref.ref(tokens[0], died)
    finally:
        tokens.clear()  # the traceback of an exception keeps this frame


def queue_end(
    end: Callable[[], None] | None, died: Callable[[weakref.ref[Token]], None] | None = None
) -> weakref.ref[Token]:
    """Have the engine call ``end`` when the backward that runs now is complete.

    Returns a weak reference to a token that dies with this backward. No other frame holds the
    token, so the traceback of an exception does not keep it alive. ``died`` is called with that
    reference, as long as somebody has it, before an exception reaches who called ``backward``.
    """
    tokens = [Token()]

    def callback() -> None:
        if end is not None:
            end()
        tokens.clear()  # a thread of a device may keep the callback longer than the backward runs

    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(tokens[0], died)


def in_backward() -> bool:
    """Whether this thread runs inside a backward, as in a hook or a recomputed forward."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether this thread runs inside of ``torch.func`` (``grad``, ``jvp``, ``vmap`` ...)."""
    return torch._C._functorch.maybe_current_level() is not None


def in_other_differentiation(tensors: Iterable[Tensor]) -> bool:
    """Whether ``torch.func`` runs, or forward-mode differentiation goes through a tensor.

    Outside of both, nobody looks for ``tensors``, which may be a search.
    """
    if forward_ad._current_level < 0:
        return in_transform()
    return in_transform() or any(map(_has_tangent, tensors))


def _has_tangent(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None


def will_accumulate(param: Tensor) -> bool:
    """Whether the backward that runs now adds to ``param.grad``.

    ``torch.autograd.grad`` does not, and ``backward(inputs=...)`` adds only to its inputs.
    """
    return _will_run_leaf(get_gradient_edge(param).node)


def is_of_inputs_only(params: Sequence[Tensor]) -> bool:
    """Whether the backward that runs now is for some tensors only, of which none is in ``params``.

    Such as ``torch.autograd.grad`` of the input of a model. An ordinary backward that comes to none
    of ``params`` is none. Asked in a hook.
    """
    node = torch._C._current_autograd_node()
    leaves = iter(()) if node is None else _leaves_below(node)  # None in a callback at the end
    first = next(leaves, None)
    if first is None or _will_run_leaf(first[0]):
        return False  # an ordinary backward runs all leaves
    known = set(map(id, params))
    if any(id(tensor) in known and _will_run_leaf(leaf) for leaf, tensor in leaves):
        return False
    return not any(param.requires_grad and will_accumulate(param) for param in params)


def _leaves_below(node: Node) -> Iterator[tuple[Node, Tensor]]:
    """The nodes that accumulate, and for which tensor, of all that backward comes to."""
    seen, left = set[Node](), [node]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield node, variable
        left += [following for following, _ in node.next_functions if following is not None]


def will_accumulate_from(node: Node, index: int) -> bool:
    """The same of the parameter that is input ``index`` of ``node``, asked in its backward."""
    leaf = node.next_functions[index][0]
    return leaf is not None and _will_run_leaf(leaf)


def _will_run_leaf(leaf: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch does not answer where autograd.grad asks for the leaf itself
        return False


def sequence_number() -> int:
    """The number of the next node that this thread records; backward runs high numbers first."""
    return torch._C._autograd._get_sequence_nr()


def will_run(node: Node) -> bool:
    """Whether the backward that runs now reaches, or has reached, ``node``, which is no leaf."""
    return bool(torch._C._will_engine_execute_node(node))


def run_backward(edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """``torch.autograd.backward`` of the edges, at half its cost in Python.

    The engine itself checks that the gradients fit the edges.
    """
    # Looked up each time, because simulated ranks replace it.
    run = vars(torch.autograd)["_engine_run_backward"]
    run(
        tuple(edges),
        tuple(grads),
        False,  # retain_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


# Adding to ``.grad`` ---------------------------------------------------------------------------


def add_gradient(param: Tensor, grad: Tensor) -> None:
    """Add ``grad`` as autograd does: the first one becomes ``.grad`` itself."""
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient (out, in) of the weight of a linear layer.

    ``x`` is its input (..., in), and ``grad`` the gradient of its output (..., out).
    """
    return _rows(grad).t() @ _rows(x)


def add_weight_gradient(weight: Tensor, x: Tensor, grad: Tensor) -> None:
    """``add_gradient(weight, weight_gradient(x, grad))`` in one pass over memory."""
    if weight.grad is None:
        weight.grad = weight_gradient(x, grad)
    else:
        weight.grad.addmm_(_rows(grad).t(), _rows(x))


def add_row_gradients(weight: Tensor, index: Tensor, grad: Tensor) -> None:
    """Add the gradients of rows of ``weight``, which has a ``.grad`` already.

    ``index`` has any shape, and rows may repeat. ``grad`` is (*index.shape, width).
    """
    assert weight.grad is not None
    weight.grad.index_add_(0, index.reshape(-1), _rows(grad))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
