"""Error budgets: how far a result may be from the float64 oracle."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# Largest relative error whatever the budget says, by the bits of the inputs.
_CEILING = {
    "output": {16: 1e-2, 32: 1e-4, 64: 1e-9},
    "gradient": {16: 2e-2, 32: 1e-4, 64: 1e-9},
}
# A tensor whose root mean square is below this share of `unit` counts as zero.
_ZERO = 1e-6


def relative_error(x: Tensor, ref: Tensor) -> float:
    """Norm of ``x - ref`` over the norm of ``ref``.

    inf when ``x`` is not finite where ``ref`` is, or is not zero where all of ``ref`` is.
    """
    x, ref = _comparable(x, ref)
    error, norm = (x - ref).norm().item(), ref.norm().item()
    if not math.isfinite(error):
        return math.inf
    if norm == 0:
        return math.inf if error > 0 else 0.0
    return error / norm


def worst_error(x: Tensor, ref: Tensor, dims: tuple[int, ...], floor: float = 1e-3) -> float:
    """The largest :func:`relative_error` among the slices of ``x`` along ``dims``.

    Args:
        dims: what is kept apart, e.g. ``(0, 1, 2)`` of ``o [B, T, HV, V]`` for each row of a head,
            ``(2, 3)`` of ``dg [B, T, HV, K]`` for each channel, ``(0, 1)`` of a state for a head.
        floor: a slice smaller (root mean square) than this share of the whole tensor is measured
            against that share, since its last digits are rounding of the others.
    """
    x, ref = _comparable(x, ref)
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
    dims: tuple[int, ...] | None = None,
    least: float = 0.0,
    others: Callable[[], list[Tensor]] | None = None,
) -> None:
    """Fails when ``got`` is further from ``oracle`` than the roundings of the formula explain.

    The relative error may be twice that of ``budget_ref`` plus 2 ulp of ``got``'s dtype, and never
    above 1e-2 (outputs, states) or 2e-2 (gradients) for 16-bit inputs, 1e-4 for float32.

    Args:
        name: of the tensor, for the message.
        budget_ref: the same tensor from :func:`chunk_budget_reference`.
        dtype: of the inputs q, k, v.
        kind: ``"output"`` (outputs and states) or ``"gradient"``.
        unit: a typical size of the tensor's elements. An oracle with a root mean square below 1e-6
            of it counts as zero (gradients that cancel, a state that its gate has emptied); then
            the root mean square of the error must be below that, too.
        dims: keep slices apart along these, and hold the worst of them (see :func:`worst_error`)
            to three times the budget reference's worst plus 4 ulp as well: the largest of many
            errors varies more between two sets of roundings than their root mean square.
        least: a relative error that is always allowed.
        others: gives the tensor from the budget reference under other roundings, where a few of
            them may decide the error, and what it is relative to may cancel; asked where the error
            of ``budget_ref`` is too small, and then :func:`share_of_errors` is allowed.
    """
    if got.shape != oracle.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)}, expected {list(oracle.shape)}")
    wrong = int((~torch.isfinite(got)).sum())
    if wrong:
        raise AssertionError(f"{name}: {wrong} of {got.numel()} elements are not finite")
    if got.numel() == 0:
        return
    if _size(oracle) < _ZERO * unit:
        error = _size(_difference(got, oracle))
        if error > _ZERO * unit:
            raise AssertionError(f"{name}: should be zero, has a root mean square of {error:.3e}")
        return
    ulp = torch.finfo(got.dtype).eps

    def check(what: str, measure: Callable, factor: int, slack: float, ceiling: float):
        error, expected = measure(got), measure(budget_ref)
        allowed = min(max(factor * expected + slack, least), ceiling)
        if error > allowed and others is not None:
            share = share_of_errors((expected, *map(measure, others())))
            allowed = max(share + slack, allowed)
        if error > allowed:
            raise AssertionError(f"{name}: {what} {error:.3e} is above {allowed:.3e}")

    ceiling = _CEILING[kind][torch.finfo(dtype).bits]
    check("error", lambda x: relative_error(x, oracle), 2, 2 * ulp, ceiling)
    if dims is not None:
        what = f"worst error along dimensions {dims}"
        check(what, lambda x: worst_error(x, oracle, dims), 3, 4 * ulp, math.inf)


def share_of_errors(errors: Iterable[float]) -> float:
    """Six times the root mean square of errors under several sets of roundings: twice, as for other
    tensors, three standard deviations."""
    squares = [error**2 for error in errors]
    return 6 * math.sqrt(sum(squares) / len(squares))


def _comparable(x: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != ref.shape:
        raise ValueError(f"shapes differ: {list(x.shape)} and {list(ref.shape)}")
    return x.detach().cpu().double(), ref.detach().cpu().double()


def _difference(x: Tensor, ref: Tensor) -> Tensor:
    x, ref = _comparable(x, ref)
    return x - ref


def _size(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()
