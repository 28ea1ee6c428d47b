"""Arguments of the gated_delta_rule ops: one structure, one place that checks them."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .checks import CHUNK
from .decay import chunk_rows
from .kda import check_backward  # noqa: F401  (the residuals are KDA's)


class GdnCall(NamedTuple):
    """The checked arguments of one call. Sizes are symbolic while tracing."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None  # [B, T, HV]
    beta: Tensor  # [B, T, HV]
    scale: float
    initial_state: Tensor | None  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    output_final_state: bool
    cu_seqlens: Tensor | None  # [N + 1]
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV]
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    chunk_size: int
    split_size: int
    disable_recompute: bool
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int

    # Not options of this family: what KDA has without them.
    safe_gate = False
    lower_bound = None

    @property
    def rows(self) -> int:
        """Slots for (sequence, chunk) pairs: an upper bound from shapes alone."""
        return chunk_rows(self.B, self.T, self.N, self.cu_seqlens is not None, CHUNK)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        if self.state_v_first:
            return (self.N, self.HV, self.V, self.K)
        return (self.N, self.HV, self.K, self.V)

    @property
    def state_dtype(self) -> torch.dtype:
        """States leave in fp32, whatever the path; in float64 for float64 inputs."""
        return torch.float64 if self.q.dtype is torch.float64 else torch.float32


def check(
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
) -> GdnCall:
    """Check the arguments of a gated_delta_rule op and return them with their sizes.

    Raises:
        ValueError: a shape, a device or a value breaks the contract.
        TypeError: a dtype does.
    """
    B, T, H, K, HV, V = checks.qkv_shapes(q, k, v)
    checks.delta_channels("q and k", K)
    if g is not None:
        if g.dim() == 4:
            raise ValueError(
                "gated_delta_rule takes one gate per head: g must have 3 dimensions [B, T, HV], "
                f"got shape {list(g.shape)}; one per key channel, [B, T, HV, K], is kda"
            )
        checks.shape("g", g, (B, T, HV), "B, T, HV")
    checks.shape("beta", beta, (B, T, HV), "B, T, HV")
    checks.qkv_dtype(q, k, v)
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        if x is not None:
            checks.device(name, x, q)
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            checks.dtype(name, x, checks.GATE_DTYPES)

    N = checks.sequences(q, initial_state, cu_seqlens, state_v_first, (HV, K, V))
    _check_gate(q, HV, g, A_log, dt_bias, use_gate_in_kernel)
    checks.beta_options(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    checks.chunk_hints(chunk_size, split_size)
    scale = checks.resolved_scale(scale, K)
    return GdnCall(
        q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, A_log, dt_bias,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, state_v_first, chunk_size, split_size, disable_recompute,
        B, T, H, HV, K, V, N,
    )  # fmt: skip


def _check_gate(
    q: Tensor,
    HV: int,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_gate_in_kernel: bool,
) -> None:
    parameters = (("A_log", A_log), ("dt_bias", dt_bias))
    if not use_gate_in_kernel:
        for name, x in parameters:
            checks.no_gate_parameter(name, x)
        return
    for name, x in (("g", g), ("A_log", A_log)):
        if x is None:
            raise ValueError(f"{name} is needed with use_gate_in_kernel=True, got None")
    for name, x in parameters:
        if x is not None:
            checks.shape(name, x, (HV,), "HV")
            checks.dtype(name, x, checks.GATE_DTYPES)
            checks.device(name, x, q)


def check_values(call: GdnCall) -> None:
    """What only the device knows. Reads tensors on the host: FLAOP_DEBUG=1, outside capture."""
    if call.cu_seqlens is not None:
        checks.cu_seqlens_values(call.cu_seqlens, call.T)
    if call.g is not None and not call.use_gate_in_kernel:
        checks.gate_values("g", call.g)
