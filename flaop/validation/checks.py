"""Checks shared by the families. Every error names the argument, what came and what was expected.

Sizes may be symbolic: only sizes of tensors are compared with each other, so that no check
specialises a length, and a comparison of unbacked sizes becomes a run-time assertion.
"""

import math
import os

import torch
from torch import Tensor

# Read once: a traced graph and the process it runs in must agree on it.
DEBUG = os.environ.get("FLAOP_DEBUG", "0") not in ("", "0")

QKV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CHUNK_SIZES = (16, 32, 64)
# A delta family holds all key channels of a state at once.
MAX_K = 256
# The kernels' own chunk; `chunk_size` is a hint.
CHUNK = 64


def holds(condition) -> bool:
    """The truth of a comparison of sizes; an undecidable symbolic one is asserted at run time."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import expect_true

    return expect_true(condition)


def rank(name: str, x: Tensor, layout: str) -> None:
    """`layout` lists the dimensions, e.g. "B, T, H, K"."""
    expected = layout.count(",") + 1
    if x.dim() != expected:
        raise ValueError(
            f"{name} must have {expected} dimensions [{layout}], got shape {list(x.shape)}"
        )


def shape(name: str, x: Tensor, expected: tuple, layout: str) -> None:
    """`expected` are the sizes of the dimensions that `layout` lists."""
    sizes = x.shape
    if len(sizes) == len(expected):
        for got, wanted in zip(sizes, expected):
            same = got == wanted
            if same is not True and not holds(same):
                break
        else:
            return
    raise ValueError(f"{name} must have shape [{layout}] = {list(expected)}, got {list(sizes)}")


def dtype(name: str, x: Tensor, allowed: tuple) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"{name} must be {_names(allowed)}, got {x.dtype}")


def qkv_dtype(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One dtype for q, k and v; float64 on the CPU only."""
    one_dtype(q=q, k=k, v=v)


def one_dtype(**tensors: Tensor) -> None:
    """The dtype of the first one for all; float64 on the CPU only."""
    (first, q), *others = tensors.items()
    if q.dtype is torch.float64:
        if q.device.type not in ("cpu", "meta"):
            raise TypeError(f"{first} may be torch.float64 on the CPU only, got it on {q.device}")
    else:
        dtype(first, q, QKV_DTYPES)
    for name, x in others:
        if x.dtype is not q.dtype:
            raise TypeError(f"{name} must have the dtype of {first}, {q.dtype}, got {x.dtype}")


def state_dtype(name: str, x: Tensor, q: Tensor) -> None:
    """fp32, bf16 or fp16; float64 beside float64 inputs."""
    dtype(name, x, (*STATE_DTYPES, torch.float64) if q.dtype is torch.float64 else STATE_DTYPES)


def device(name: str, x: Tensor, q: Tensor, of: str = "q") -> None:
    """`of` is what q is called."""
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of {of}, {q.device}, got {x.device}")


def cu_seqlens_layout(cu_seqlens: Tensor, q: Tensor, of: str = "q") -> None:
    """Offsets [N + 1], int32 or int64, beside packed tokens in a batch of one."""
    rank("cu_seqlens", cu_seqlens, "N + 1")
    dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if not holds(cu_seqlens.shape[0] >= 1):
        raise ValueError("cu_seqlens must have shape [N + 1], got [0]")
    if not holds(q.shape[0] == 1):
        raise ValueError(
            f"cu_seqlens needs a batch of one (packed sequences), got {of} of shape {list(q.shape)}"
        )
    device("cu_seqlens", cu_seqlens, q, of)


def _names(dtypes: tuple) -> str:
    *head, last = map(str, dtypes)
    return f"{', '.join(head)} or {last}" if head else last


def qkv_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    """B, T, H, K, HV, V of q and k [B, T, H, K] and v [B, T, HV, V]."""
    rank("q", q, "B, T, H, K")
    rank("v", v, "B, T, HV, V")
    shape("k", k, tuple(q.shape), "B, T, H, K")
    return heads("q", q, v)


def heads(
    name: str, q: Tensor, v: Tensor, values: str = "v"
) -> tuple[int, int, int, int, int, int]:
    """B, T, H, K, HV, V of q (or k, called `name`) and v (called `values`), both of rank 4."""
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    shape(values, v, (B, T, HV, V), "B, T, HV, V")
    if not (holds(H >= 1) and holds(K >= 1) and holds(V >= 1)):
        raise ValueError(
            f"{name} and {values} need at least one head and one channel, "
            f"got {name} of shape {list(q.shape)} and {values} of shape {list(v.shape)}"
        )
    if not holds(HV % H == 0):
        raise ValueError(
            f"{values} must have a multiple of {name}'s heads, got HV = {HV} for H = {H}"
        )
    return B, T, H, K, HV, V


def sequences(
    q: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    sizes: tuple[int, int, int],
    of: str = "q",
) -> int:
    """Check the offsets and the state that enters; N. `sizes` are HV, K and V."""
    HV, K, V = sizes
    N = q.shape[0]
    if cu_seqlens is not None:
        cu_seqlens_layout(cu_seqlens, q, of)
        N = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        layout, expected = "N, HV, K, V", (N, HV, K, V)
        if state_v_first:
            layout, expected = "N, HV, V, K", (N, HV, V, K)
        shape("initial_state", initial_state, expected, layout)
        state_dtype("initial_state", initial_state, q)
        device("initial_state", initial_state, q, of)
    return N


def delta_channels(name: str, K: int) -> None:
    """Of what a delta family takes; `name` is what has K channels."""
    if not holds(K <= MAX_K):
        raise ValueError(
            f"{name} may have at most {MAX_K} channels in a delta family, got K = {K}; "
            "simple_gla and gla take any K"
        )


def beta_options(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> None:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval=True doubles the sigmoid of beta: it needs "
            "use_beta_sigmoid_in_kernel=True, got False"
        )


def no_gate_parameter(name: str, x: Tensor | float | None) -> None:
    """Without use_gate_in_kernel a parameter of the gate is an error."""
    if x is not None:
        raise ValueError(
            f"{name} belongs to the gate computed in the kernel: it needs "
            "use_gate_in_kernel=True, got False"
        )


def chunk_hints(chunk_size: int, split_size: int) -> None:
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {CHUNK_SIZES}, got {chunk_size}")
    if split_size < 0 or split_size % chunk_size != 0:
        raise ValueError(
            f"split_size must be 0 or a positive multiple of chunk_size = {chunk_size}, "
            f"got {split_size}"
        )


def resolved_scale(scale: float | None, K: int) -> float:
    if scale is None:
        return K**-0.5
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def incoming_gradients(
    call, d_o: Tensor | None, d_final_state: Tensor | None, **residuals: tuple
) -> None:
    """Check what a backward op takes beside the inputs of its forward.

    `call` is the structure of a family; a residual comes with the size of its last dimension:
    [B, T, HV, size].
    """
    leading = (call.B, call.T, call.HV)
    if d_o is not None:
        shape("d_o", d_o, (*leading, call.V), "B, T, HV, V")
        device("d_o", d_o, call.q)
    if d_final_state is not None:
        layout = "N, HV, V, K" if call.state_v_first else "N, HV, K, V"
        shape("d_final_state", d_final_state, call.state_shape, layout)
        device("d_final_state", d_final_state, call.q)
    for name, (x, size, letter) in residuals.items():
        shape(name, x, (*leading, size), f"B, T, HV, {letter}")
        device(name, x, call.q)


def gate_values(name: str, g: Tensor) -> None:
    """Read a log gate on the host (FLAOP_DEBUG=1 only)."""
    if g.numel() and (high := g.max().item()) > 0:
        raise ValueError(f"{name} must be at most 0, got {high} (FLAOP_DEBUG=1)")


def cu_seqlens_values(cu_seqlens: Tensor, T: int) -> None:
    """Read the offsets on the host (FLAOP_DEBUG=1 only)."""
    bounds = cu_seqlens.tolist()
    if bounds[0] < 0 or bounds[-1] > T or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(
            f"cu_seqlens must not decrease and stay in [0, T = {T}], got {bounds} (FLAOP_DEBUG=1)"
        )
