"""Adding one more gradient to ``.grad``.

[Note: added where it lies]
A gradient of a later microbatch is usually made, and then added: the weight's size is written once,
read twice and written again. For a linear layer the product can be added by the multiplication
itself, and for an embedding only the rows that were looked up need to be touched. Megatron-LM does
the first ("gradient accumulation fusion") by a kernel of its own; here it is ``addmm_``.
"""

from __future__ import annotations

from torch import Tensor


def add_gradient(param: Tensor, grad: Tensor) -> None:
    """Add ``grad`` as autograd does: the first one becomes ``.grad`` itself."""
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad


def product(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the weight of a linear layer.

    Args:
        x: its input. (..., in)
        grad: of its output. (..., out)

    Returns:
        (out, in)
    """
    return _rows(grad).t() @ _rows(x)


def add_product(weight: Tensor, x: Tensor, grad: Tensor) -> None:
    """``add_gradient(weight, product(x, grad))`` in one pass over memory."""
    if weight.grad is None:
        weight.grad = product(x, grad)
    else:
        weight.grad.addmm_(_rows(grad).t(), _rows(x))


def add_rows(weight: Tensor, index: Tensor, grad: Tensor) -> None:
    """Add the gradients of rows of ``weight``, which has a ``.grad`` already.

    Args:
        index: of the rows, any shape; rows may repeat.
        grad: of them. (*index.shape, width)
    """
    assert weight.grad is not None
    weight.grad.index_add_(0, index.reshape(-1), _rows(grad))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
