"""Arguments of the decay families (simple_gla, gla): one structure, one place to check them."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .checks import CHUNK


class DecayCall(NamedTuple):
    """The checked arguments of one call. Sizes are symbolic while tracing."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None  # [B, T, HV] (simple_gla) or [B, T, HV, K] (gla)
    g_gamma: Tensor | None  # [HV], added to g at every token (simple_gla)
    gv: Tensor | None  # [B, T, HV, V] (gla, recurrent only)
    scale: float
    initial_state: Tensor | None  # [N, HV, K, V], or [N, HV, V, K] with state_v_first
    output_final_state: bool
    cu_seqlens: Tensor | None  # [N + 1]
    state_v_first: bool
    chunk_size: int
    split_size: int  # a multiple of CHUNK, or 0
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int

    @property
    def channel(self) -> bool:
        """One gate per key channel: the family is gla."""
        return self.g is not None and self.g.dim() == 4

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


def chunk_rows(B: int, T: int, N: int, packed: bool, size: int) -> int:
    """Slots for pairs of a sequence and a piece of `size` tokens."""
    pieces = (T + size - 1) // size
    return torch.sym_max(pieces + N - 1, 0) if packed else B * pieces


def check_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
) -> DecayCall:
    """Check the arguments of a simple_gla op and return them with their sizes.

    Raises:
        ValueError: a shape, a device or a value breaks the contract.
        TypeError: a dtype does.
    """
    sizes = checks.qkv_shapes(q, k, v)
    B, T, _, _, HV, _ = sizes
    if g is not None:
        if g.dim() != 3:
            raise ValueError(
                "simple_gla takes one gate per head: g must have 3 dimensions [B, T, HV], got "
                f"shape {list(g.shape)}; one per key channel, [B, T, HV, K], is gla"
            )
        checks.shape("g", g, (B, T, HV), "B, T, HV")
    if g_gamma is not None:
        checks.shape("g_gamma", g_gamma, (HV,), "HV")
    return _call(
        *(q, k, v, g, g_gamma, None, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size, sizes),
    )


def check_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    gv: Tensor | None = None,
) -> DecayCall:
    """Check the arguments of a gla op and return them with their sizes.

    Raises:
        ValueError: a shape, a device or a value breaks the contract.
        TypeError: a dtype does.
    """
    sizes = checks.qkv_shapes(q, k, v)
    B, T, _, K, HV, V = sizes
    if g.dim() != 4:
        raise ValueError(
            "gla takes one gate per key channel: g must have 4 dimensions [B, T, HV, K], got "
            f"shape {list(g.shape)}; one per head, [B, T, HV], is simple_gla"
        )
    checks.shape("g", g, (B, T, HV, K), "B, T, HV, K")
    if gv is not None:
        checks.shape("gv", gv, (B, T, HV, V), "B, T, HV, V")
    return _call(
        *(q, k, v, g, None, gv, scale, initial_state, output_final_state, cu_seqlens),
        *(state_v_first, chunk_size, split_size, sizes),
    )


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    gv: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    chunk_size: int,
    split_size: int,
    sizes: tuple[int, int, int, int, int, int],
) -> DecayCall:
    """What both families ask of their arguments beside the shapes of the gates."""
    B, T, H, K, HV, V = sizes
    checks.qkv_dtype(q, k, v)
    for name, x in (("k", k), ("v", v), ("g", g), ("g_gamma", g_gamma), ("gv", gv)):
        if x is not None:
            checks.device(name, x, q)
    for name, x in (("g", g), ("g_gamma", g_gamma), ("gv", gv)):
        if x is not None:
            checks.dtype(name, x, checks.GATE_DTYPES)
    N = checks.sequences(q, initial_state, cu_seqlens, state_v_first, (HV, K, V))
    checks.chunk_hints(chunk_size, split_size)
    # Kernels split between chunks of their own.
    split_size = -(-split_size // CHUNK) * CHUNK
    return DecayCall(
        q, k, v, g, g_gamma, gv, checks.resolved_scale(scale, K), initial_state,
        output_final_state, cu_seqlens, state_v_first, chunk_size, split_size,
        B, T, H, HV, K, V, N,
    )  # fmt: skip


def check_backward(
    call: DecayCall, d_o: Tensor | None, d_final_state: Tensor | None, A: Tensor | None = None
) -> None:
    """Check what a backward op takes beside the inputs of its forward; A is gla's residual."""
    residuals = {} if A is None else {"A": (A, CHUNK, CHUNK)}
    checks.incoming_gradients(call, d_o, d_final_state, **residuals)


def check_values(call: DecayCall) -> None:
    """What only the device knows. Reads tensors on the host: FLAOP_DEBUG=1, outside capture."""
    if call.cu_seqlens is not None:
        checks.cu_seqlens_values(call.cu_seqlens, call.T)
    for name in ("g", "g_gamma", "gv"):
        if getattr(call, name) is not None:
            checks.gate_values(name, getattr(call, name))
