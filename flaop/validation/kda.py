"""Arguments of the KDA ops: one structure, one place that checks them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks

MAX_K = 256
CHUNK_SIZES = (16, 32, 64)
# The kernels' own chunk; `chunk_size` is a hint.
CHUNK = 64
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
    checks.rank("q", q, "B, T, H, K")
    checks.rank("v", v, "B, T, HV, V")
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    checks.shape("k", k, (B, T, H, K), "B, T, H, K")
    checks.shape("v", v, (B, T, HV, V), "B, T, HV, V")
    if not (checks.holds(H >= 1) and checks.holds(K >= 1) and checks.holds(V >= 1)):
        raise ValueError(
            "q and v need at least one head and one channel, "
            f"got q of shape {list(q.shape)} and v of shape {list(v.shape)}"
        )
    if not checks.holds(HV % H == 0):
        raise ValueError(f"v must have a multiple of q's heads, got HV = {HV} for H = {H}")
    if not checks.holds(K <= MAX_K):
        raise ValueError(f"q and k may have at most {MAX_K} channels, got K = {K}")
    checks.shape("g", g, (B, T, HV, K), "B, T, HV, K")
    checks.shape("beta", beta, (B, T, HV), "B, T, HV")
    checks.qkv_dtype(q, k, v)
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        checks.device(name, x, q)
    checks.dtype("g", g, checks.GATE_DTYPES)
    checks.dtype("beta", beta, checks.GATE_DTYPES)

    N = B
    if cu_seqlens is not None:
        checks.cu_seqlens_layout(cu_seqlens, q)
        checks.device("cu_seqlens", cu_seqlens, q)
        N = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        layout, expected = "N, HV, K, V", (N, HV, K, V)
        if state_v_first:
            layout, expected = "N, HV, V, K", (N, HV, V, K)
        checks.shape("initial_state", initial_state, expected, layout)
        checks.state_dtype("initial_state", initial_state, q)
        checks.device("initial_state", initial_state, q)

    _check_gate(q, HV, K, A_log, dt_bias, use_gate_in_kernel, safe_gate, lower_bound)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval=True doubles the sigmoid of beta: it needs "
            "use_beta_sigmoid_in_kernel=True, got False"
        )
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {CHUNK_SIZES}, got {chunk_size}")
    if split_size < 0 or split_size % chunk_size != 0:
        raise ValueError(
            f"split_size must be 0 or a positive multiple of chunk_size = {chunk_size}, "
            f"got {split_size}"
        )
    if scale is None:
        scale = K**-0.5
    elif isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
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
            if x is not None:
                raise ValueError(
                    f"{name} belongs to the gate computed in the kernel: it needs "
                    "use_gate_in_kernel=True, got False"
                )
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
    leading = (call.B, call.T, call.HV)
    if d_o is not None:
        checks.shape("d_o", d_o, (*leading, call.V), "B, T, HV, V")
        checks.device("d_o", d_o, call.q)
    if d_final_state is not None:
        layout = "N, HV, V, K" if call.state_v_first else "N, HV, K, V"
        checks.shape("d_final_state", d_final_state, call.state_shape, layout)
        checks.device("d_final_state", d_final_state, call.q)
    for name, x in residuals.items():
        if name == "u":
            checks.shape(name, x, (*leading, call.V), "B, T, HV, V")
        else:
            checks.shape(name, x, (*leading, CHUNK), f"B, T, HV, {CHUNK}")
        checks.device(name, x, call.q)


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
