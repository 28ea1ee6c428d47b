"""Error budgets: what a kernel may be off by, and the assertions that hold it to that."""

import math

import torch
from torch import Tensor

# Largest relative error whatever the budget says.
_CEILING = {
    ("output", 16): 1e-2,
    ("gradient", 16): 2e-2,
    ("output", 32): 1e-4,
    ("gradient", 32): 1e-4,
    ("output", 64): 1e-9,
    ("gradient", 64): 1e-9,
}
# A tensor whose root mean square is below this share of `unit` counts as zero and is compared absolutely.
_ZERO = 1e-6


def relative_error(x: Tensor, ref: Tensor) -> float:
    """Norm of ``x - ref`` over the norm of ``ref``; inf when ``x`` holds a NaN or differs from a zero ``ref``."""
    x, ref = (y.detach().cpu().double() for y in (x, ref))
    if x.shape != ref.shape:
        raise ValueError(f"shapes differ: {tuple(x.shape)} and {tuple(ref.shape)}")
    error, norm = (x - ref).norm().item(), ref.norm().item()
    if not math.isfinite(error):
        return math.inf
    return error / norm if norm > 0 else (math.inf if error > 0 else 0.0)


def worst_error(x: Tensor, ref: Tensor, dims: tuple[int, ...], floor: float = 1e-3) -> float:
    """The largest :func:`relative_error` among the slices of ``x`` along ``dims``.

    Args:
        dims: what stays apart, e.g. ``(0, 1, 2)`` of ``o [B, T, HV, V]`` for each row of each head, ``(2, 3)``
            of ``dg [B, T, HV, K]`` for each channel, ``(0, 1)`` of a state for each head.
        floor: a slice whose root mean square is below this share of the whole tensor's is measured against
            that share instead: its digits are rounding of the others.
    """
    x, ref = (y.detach().cpu().double() for y in (x, ref))
    if x.shape != ref.shape:
        raise ValueError(f"shapes differ: {tuple(x.shape)} and {tuple(ref.shape)}")
    if x.numel() == 0:
        return 0.0
    if not x.isfinite().all():
        return math.inf
    over = [d for d in range(x.ndim) if d not in {e % x.ndim for e in dims}]
    error, size = (x - ref).square(), ref.square()
    least = floor * size.mean().sqrt()
    if over:
        error, size = error.mean(over), size.mean(over)
    error, size = error.sqrt(), size.sqrt().clamp_min(least)
    return torch.where(error == 0, 0.0, error / size).max().item()


def assert_within_budget(
    name: str,
    got: Tensor,
    oracle: Tensor,
    budget_ref: Tensor,
    dtype: torch.dtype,
    kind: str = "output",
    unit: float = 1.0,
) -> None:
    """Fails when ``got`` is further from ``oracle`` than the roundings of the chunkwise formula explain.

    The error (relative, L2) may be twice that of ``budget_ref`` plus 2 ulp of ``got``'s dtype, and never above
    1e-2 (outputs, states) or 2e-2 (gradients) for 16-bit inputs and 1e-4 for float32.

    Args:
        name: of the tensor, for the message.
        budget_ref: the same tensor from :func:`chunk_budget_reference`.
        dtype: of the inputs q, k, v.
        kind: ``"output"`` (outputs and states) or ``"gradient"``.
        unit: a typical size of the tensor's elements. An oracle whose root mean square is below 1e-6 of it
            counts as zero (gradients that cancel, a state emptied by its gate): the root mean square of the
            error is then held below that same size instead of a relative error.
    """
    if got.shape != oracle.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(oracle.shape)}")
    if not torch.isfinite(got).all():
        raise AssertionError(f"{name}: {int((~torch.isfinite(got)).sum())} elements are not finite")
    if got.numel() == 0:
        return
    size = oracle.detach().double().square().mean().sqrt().item()
    ceiling = _CEILING[kind, torch.finfo(dtype).bits]
    if size < _ZERO * unit:
        error = (got.detach().cpu().double() - oracle.detach().cpu().double()).square().mean().sqrt().item()
        allowed = _ZERO * unit
    else:
        error = relative_error(got, oracle)
        budget = 2 * relative_error(budget_ref, oracle) + 2 * torch.finfo(got.dtype).eps
        allowed = min(budget, ceiling)
    if error > allowed:
        raise AssertionError(f"{name}: error {error:.3e} is above {allowed:.3e} (ceiling {ceiling:g})")
