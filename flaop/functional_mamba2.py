"""Mamba-2's state-space duality as a documented mapping to simple_gla."""

import torch
import torch.nn.functional as F
from torch import Tensor

from flaop.functional_decay import simple_gla


def mamba2_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int = 64,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    # torch.compile(dynamic=True) takes the integer as a constant, 0.0 at the cost of a restart.
    dt_limit: tuple[float, float] = (0, float("inf")),
    return_final_states: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The state-space model of Mamba-2: `flaop.simple_gla` with q = C, k = B, v = x dt, g = A dt.

    Per sequence and head, over a state S of shape [headdim, dstate], B and C shared by the heads of
    a group, with dt = clamp(softplus(dt + dt_bias), dt_limit):

        S <- exp(A dt_t) S + dt_t x_t B_t^T
        y_t = (S C_t + D x_t) * silu(z_t)

    Torch arithmetic around one operator: traceable, differentiable in every tensor but cu_seqlens.

    Args:
        x: [batch, T, heads, headdim]; float32, bfloat16 or float16 (float64 on the CPU).
        dt: step sizes [batch, T, heads], any floating dtype.
        A: [heads], <= 0 (the model's -exp(A_log)), any floating dtype.
        B, C: [batch, T, groups, dstate], dtype of x; heads is a multiple of groups.
        chunk_size: 16, 32 or 64: a hint.
        D: weight of the skip connection [heads] or [heads, headdim]; None: none.
        z: output gate [batch, T, heads, headdim]; None: none.
        dt_bias: [heads], added to dt; None: none.
        initial_states: [N, heads, headdim, dstate]; float32, bfloat16 or float16. N is the batch,
            or the number of packed sequences. None means zeros.
        cu_seqlens: offsets [N + 1] of packed sequences, int32 or int64; needs a batch of one.
            States do not cross them; tokens outside them read and write no state.
        dt_softplus: apply softplus to dt + dt_bias.
        dt_limit: bounds of the step size, in the unit of dt.
        return_final_states: return the states after the last token.

    Returns:
        y [batch, T, heads, headdim] in the dtype of x, and the final states [N, heads, headdim,
        dstate] in float32 (float64 for float64 inputs), or None: always a pair.

    Raises:
        ValueError: a shape, device or value breaks the above.
        TypeError: a dtype does.
        NotImplementedError: double backward.

    Cost: as `flaop.simple_gla`, with x dt in the dtype of x and A dt [batch, T, heads] in float32
    beside it, and elementwise passes over y for D and z.

    Reference: Transformers are SSMs (Mamba-2), arXiv:2405.21060.

    Example:
        >>> import torch, flaop
        >>> x, dt = torch.randn(1, 100, 8, 64), torch.randn(1, 100, 8)
        >>> A, (B, C) = -torch.rand(8), torch.randn(2, 1, 100, 2, 16)
        >>> y, states = flaop.mamba2_ssd(x, dt, A, B, C, dt_softplus=True, return_final_states=True)
        >>> y.shape, states.shape
        (torch.Size([1, 100, 8, 64]), torch.Size([1, 8, 64, 16]))
    """
    _check_ranks(x, B, C)
    heads, headdim = x.shape[2:]
    _check("dt", dt, (x.shape[:3],), "[batch, T, heads]")
    _check("A", A, ((heads,),), "[heads]")
    _check("D", D, ((heads,), (heads, headdim)), "[heads] or [heads, headdim]")
    _check("z", z, (x.shape,), "[batch, T, heads, headdim]")
    _check("dt_bias", dt_bias, ((heads,),), "[heads]")

    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    dt = dt.to(wide)
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit)
    y, states = simple_gla(
        *(C, B, (x * dt.unsqueeze(-1)).to(x.dtype), A.to(wide) * dt),
        scale=1.0, initial_state=initial_states, output_final_state=return_final_states,
        cu_seqlens=cu_seqlens, state_v_first=True, chunk_size=chunk_size,
    )  # fmt: skip
    if D is not None:
        y = y + x * (D.unsqueeze(-1) if D.dim() == 1 else D).to(wide)
    if z is not None:
        y = y * F.silu(z.to(wide))
    return y.to(x.dtype), states


def _check_ranks(x: Tensor, B: Tensor, C: Tensor) -> None:
    layouts = {
        "x": (x, "[batch, T, heads, headdim]"),
        "B": (B, "[batch, T, groups, dstate]"),
        "C": (C, "[batch, T, groups, dstate]"),
    }
    for name, (tensor, layout) in layouts.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions {layout}, got shape {list(tensor.shape)}"
            )
    if B.shape != C.shape or B.shape[:2] != x.shape[:2]:
        raise ValueError(
            "B and C must have shape [batch, T, groups, dstate] with batch and T of x "
            f"{list(x.shape)}, got {list(B.shape)} and {list(C.shape)}"
        )


def _check(name: str, x: Tensor | None, shapes: tuple[tuple, ...], layout: str) -> None:
    if x is not None and tuple(x.shape) not in [tuple(shape) for shape in shapes]:
        raise ValueError(f"{name} must have shape {layout}, got {list(x.shape)}")
