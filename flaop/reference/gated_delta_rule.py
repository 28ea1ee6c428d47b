"""The CPU kernels of the gated delta rule: those of KDA, with a gate per head or none.

A `call` is the checked call of `flaop.validation.gated_delta_rule`.
"""

from flaop.reference.kda import (
    chunk_backward,
    chunk_forward,
    recurrent_backward,
    recurrent_forward,
)

__all__ = ["chunk_backward", "chunk_forward", "recurrent_backward", "recurrent_forward"]
