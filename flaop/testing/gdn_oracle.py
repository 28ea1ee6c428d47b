"""The float64 token loop of the gated delta rule: KDA's, with a gate per head or none."""

import torch
from torch import Tensor

from flaop.testing.oracle import kda_oracle


def gdn_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Takes the arguments of ``flaop.gated_delta_rule``; hints change nothing.

    Returns:
        o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` (``[N, HV, V, K]`` with
        ``state_v_first``), always both, float64 on the CPU.
    """
    return kda_oracle(
        *(q, k, v, one_channel(g, v), beta, scale, initial_state),
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )


def one_channel(g: Tensor | None, v: Tensor) -> Tensor:
    """The gate of each head ``[B, T, HV, 1]``, for what takes one per channel."""
    if g is None:
        return torch.zeros(*v.shape[:3], 1, dtype=torch.float64)
    return g.unsqueeze(-1)
