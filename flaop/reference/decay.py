"""The CPU kernels of the decay families, simple_gla and gla.

A `call` is the checked call of `flaop.validation.decay`. Gradients come in the order q, k, v, g,
g_gamma, initial_state for a gate per head, and q, k, v, g, initial_state (then gv on the recurrent
path) for a gate per channel; `None` stands for one that is not asked for.
"""

from collections.abc import Sequence

from torch import Tensor

from flaop.reference import decay_chunk, decay_recurrent
from flaop.reference.kernel import as_kernel


@as_kernel
def chunk_forward(call) -> tuple[Tensor, Tensor, Tensor | None]:
    """o, final_state, and for gla the residual A ``[B, T, HV, 64]`` in q's dtype."""
    return decay_chunk.forward(call)


@as_kernel
def chunk_backward(
    call,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    A: Tensor | None,
    grad_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients, from the residual of :func:`chunk_forward`."""
    return decay_chunk.backward(call, d_o, d_final_state, A, grad_mask)


@as_kernel
def chunk_summary(call) -> tuple[Tensor, Tensor]:
    """What the tokens leave of a state of zeros ``[N, HV, K, V]``, and their total decay
    ``[N, HV, K]``, or ``[N, HV, 1]`` for a gate per head."""
    return decay_chunk.summary(call)


@as_kernel
def chunk_summary_backward(call) -> tuple[Tensor, Tensor]:
    """The gradient of the entering state without one of the leaving state, from d_o in the place
    of v, and the total decay."""
    return decay_chunk.summary_backward(call)


@as_kernel
def recurrent_forward(call) -> tuple[Tensor, Tensor]:
    """o and final_state."""
    return decay_recurrent.forward(call)


@as_kernel
def recurrent_backward(
    call,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    grad_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients; the states are computed again."""
    return decay_recurrent.backward(call, d_o, d_final_state, grad_mask)
