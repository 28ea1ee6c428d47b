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
def chunk_summary(call) -> tuple[Tensor, Tensor]:
    """What the tokens leave of a state of zeros ``[N, HV, K, V]``, and the transfer matrix that
    takes a state through them ``[N, HV, K, K]``."""
    return kda_chunk.summary(call)


@as_kernel
def chunk_summary_forward(call) -> tuple[Tensor, ...]:
    """o and the summary of a call whose state starts from zeros, what the tokens read of a state
    ``[B, T, HV, K]``, A and A_qk: o, read, state, transfer, A, A_qk."""
    return kda_chunk.summary_forward(call)


@as_kernel
def chunk_summary_backward(
    call, A: Tensor | None, A_qk: Tensor | None, *operands: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient of the entering state without one of the leaving state, from d_o in the place
    of v, and the matrix that takes that gradient back through the tokens. From the residuals of
    :func:`chunk_forward`, or without; operands of the CUDA kernels are not read."""
    return kda_chunk.summary_backward(call, A, A_qk)


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
