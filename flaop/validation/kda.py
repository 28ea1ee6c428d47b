"""Arguments of the KDA ops: one structure, one place that checks them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .checks import CHUNK

# Sub-chunks of 16 rows with one reference row stay inside fp32 down to this bound.
SAFE_LOWER_BOUND = -5.0


class KdaCall(NamedTuple):
    """The checked arguments of one call. Sizes are symbolic while tracing."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K]
    beta: Tensor  # [B, T, HV]
    scale: float
    initial_state: Tensor | None  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    output_final_state: bool
    cu_seqlens: Tensor | None  # [N + 1]
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV, K] or [HV * K]
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    safe_gate: bool
    lower_bound: float | None
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

    @property
    def rows(self) -> int:
        """Slots for (sequence, chunk) pairs: an upper bound from shapes alone."""
        chunks = (self.T + CHUNK - 1) // CHUNK
        if self.cu_seqlens is None:
            return self.B * chunks
        return torch.sym_max(chunks + self.N - 1, 0)

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
    g: Tensor,
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
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
) -> KdaCall:
    """Check the arguments of a KDA op and return them with their sizes.

    Raises:
        ValueError: a shape, a device or a value breaks the contract.
        TypeError: a dtype does.
    """
    B, T, H, K, HV, V = checks.qkv_shapes(q, k, v)
    checks.delta_channels("q and k", K)
    checks.shape("g", g, (B, T, HV, K), "B, T, HV, K")
    checks.shape("beta", beta, (B, T, HV), "B, T, HV")
    checks.qkv_dtype(q, k, v)
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        checks.device(name, x, q)
    checks.dtype("g", g, checks.GATE_DTYPES)
    checks.dtype("beta", beta, checks.GATE_DTYPES)

    N = checks.sequences(q, initial_state, cu_seqlens, state_v_first, (HV, K, V))
    _check_gate(q, HV, K, A_log, dt_bias, use_gate_in_kernel, safe_gate, lower_bound)
    checks.beta_options(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    checks.chunk_hints(chunk_size, split_size)
    scale = checks.resolved_scale(scale, K)
    return KdaCall(
        q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, A_log, dt_bias,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, safe_gate, lower_bound, state_v_first,
        chunk_size, split_size, disable_recompute, B, T, H, HV, K, V, N,
    )  # fmt: skip


def _check_gate(
    q: Tensor,
    HV: int,
    K: int,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_gate_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
) -> None:
    if not use_gate_in_kernel:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            checks.no_gate_parameter(name, x)
        return
    if lower_bound is None:
        if A_log is None:
            raise ValueError(
                "A_log is needed with use_gate_in_kernel=True unless lower_bound is given, got None"
            )
        if safe_gate:
            raise ValueError(
                "safe_gate=True with use_gate_in_kernel=True needs lower_bound in "
                f"[{SAFE_LOWER_BOUND}, 0), got None"
            )
    else:
        if not (math.isfinite(lower_bound) and lower_bound <= 0):
            raise ValueError(f"lower_bound must be finite and at most 0, got {lower_bound}")
        if safe_gate and not SAFE_LOWER_BOUND <= lower_bound < 0:
            raise ValueError(
                f"safe_gate=True needs lower_bound in [{SAFE_LOWER_BOUND}, 0), got {lower_bound}"
            )
    if A_log is not None:
        checks.shape("A_log", A_log, (HV,), "HV")
        checks.dtype("A_log", A_log, checks.GATE_DTYPES)
        checks.device("A_log", A_log, q)
    if dt_bias is not None:
        if dt_bias.dim() == 1:
            checks.shape("dt_bias", dt_bias, (HV * K,), "HV * K")
        else:
            checks.shape("dt_bias", dt_bias, (HV, K), "HV, K")
        checks.dtype("dt_bias", dt_bias, checks.GATE_DTYPES)
        checks.device("dt_bias", dt_bias, q)


def check_backward(
    call: KdaCall, d_o: Tensor | None, d_final_state: Tensor | None, **residuals: Tensor
) -> None:
    """Check what a backward op takes beside the inputs of its forward.

    `residuals` are `A`, `A_qk` (chunk) or `u` (recurrent).
    """
    sizes = {"u": (call.V, "V")}
    residuals = {name: (x, *sizes.get(name, (CHUNK, CHUNK))) for name, x in residuals.items()}
    checks.incoming_gradients(call, d_o, d_final_state, **residuals)


def check_values(call: KdaCall) -> None:
    """What only the device knows. Reads tensors on the host: FLAOP_DEBUG=1, outside capture."""
    if call.cu_seqlens is not None:
        checks.cu_seqlens_values(call.cu_seqlens, call.T)
    if call.use_gate_in_kernel or call.g.numel() == 0:
        return
    low, high = (x.item() for x in call.g.aminmax())
    if high > 0:
        raise ValueError(f"g must be at most 0, got {high} (FLAOP_DEBUG=1)")
    if call.safe_gate and low < SAFE_LOWER_BOUND:
        raise ValueError(
            f"safe_gate=True promises g in [{SAFE_LOWER_BOUND}, 0], got {low} (FLAOP_DEBUG=1)"
        )
