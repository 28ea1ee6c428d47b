"""The CPU kernels of KDA.

A `call` is the checked call of `flaop.validation.kda`. Gradients come in the order q, k, v, g,
beta, A_log, dt_bias, initial_state; `None` stands for one that is not asked for.
"""

from collections.abc import Sequence

from torch import Tensor

from flaop.reference import kda_chunk, kda_recurrent
from flaop.reference.kernel import as_kernel


@as_kernel
def chunk_forward(
    call, residuals: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """o, final_state, and the residuals A and A_qk ``[B, T, HV, 64]`` in q's dtype if wanted."""
    return kda_chunk.forward(call, residuals)


@as_kernel
def chunk_backward(
    call,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    A: Tensor,
    A_qk: Tensor,
    grad_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The eight gradients, from the residuals of :func:`chunk_forward`."""
    return kda_chunk.backward(call, d_o, d_final_state, A, A_qk, grad_mask)


@as_kernel
def recurrent_forward(call) -> tuple[Tensor, Tensor, Tensor]:
    """o, final_state, and the residual u ``[B, T, HV, V]`` in the dtype of final_state."""
    return kda_recurrent.forward(call)


@as_kernel
def recurrent_backward(
    call,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    u: Tensor,
    grad_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The eight gradients, from the residual of :func:`recurrent_forward`."""
    return kda_recurrent.backward(call, d_o, d_final_state, u, grad_mask)
