"""Outputs and gradients of an op against the float64 token loop, each by itself, within budget."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flaop.testing.budget import other_roundings
from flaop.testing.tolerances import (
    assert_within_budget,
    relative_error,
    share_of_errors,
    worst_error,
)

LIMIT_FP32 = 1e-4
# Gradients of parameters of the gate: few numbers.
_PARAMETERS = ("g_gamma", "A_log", "dt_bias")
_FACTORS = (1.19, 1.41, 1.68, 1.83)
# Dimensions whose slices are compared one by one: rows of heads, heads of a state.
_SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2),
    "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip


class Expected:
    """Outputs and gradients of the token loop and of the budget reference on the same inputs."""

    # A relative error that is always allowed.
    least = 0.0

    def __init__(
        self,
        inputs: dict,
        oracle: Callable[..., tuple[Tensor, Tensor]],
        budget: Callable[..., tuple[Tensor, Tensor]],
        names: Sequence[str],
    ):
        """``names``: the differentiable inputs, of which some may be ``None`` or absent."""
        self.inputs = inputs
        self.dtype = inputs["q"].dtype
        self.names = [name for name in names if inputs.get(name) is not None]
        self.budget = budget
        self.d_o = self.d_state = None
        self.values, self.gradients = zip(self._run(oracle), self._run(budget), strict=True)

    def _run(self, fn: Callable[..., tuple[Tensor, Tensor]]) -> tuple[dict, dict]:
        """Outputs by name, and the gradients through each of them."""
        leaves = self.leaves()
        o, state = fn(**{**self.inputs, **leaves})
        if self.d_o is None:
            generator = torch.Generator().manual_seed(1)
            self.d_o = torch.randn(o.shape, generator=generator).to(self.dtype)
            self.d_state = torch.randn(state.shape, generator=generator)
        gradients = {
            output: _gradients(x, leaves, d)
            for output, x, d in (("o", o, self.d_o), ("final_state", state, self.d_state))
        }
        return {"o": o.detach(), "final_state": state.detach()}, gradients

    @functools.cached_property
    def other_gradients(self) -> list[dict]:
        """Those of the budget reference with other roundings."""
        gradients = []
        for factor in _FACTORS:
            with other_roundings(factor):
                gradients.append(self._run(self.budget)[1])
        return gradients

    def leaves(self) -> dict[str, Tensor]:
        """What the references are differentiated by."""
        return {name: self.inputs[name].detach().requires_grad_() for name in self.names}

    def gradient(self, which: int, name: str, loss: str) -> Tensor:
        """Of the oracle (0) or the budget reference (1)."""
        return _through(self.gradients[which], name, loss)

    def compare_outputs(self, o: Tensor, state: Tensor | None) -> None:
        for name, got in (("o", o), ("final_state", state)):
            if got is not None:
                oracle, budget = (values[name] for values in self.values)
                self._compare(name, got, oracle, budget, "output", _SLICES[name])

    def compare_gradient(self, name: str, got: Tensor, loss: str) -> None:
        assert got.dtype == self.inputs[name].dtype, name
        oracle, budget = (self.gradient(i, name, loss) for i in (0, 1))
        label = f"gradient of {name} through {loss}"

        others = self.others(name, loss)
        terms = self.terms(name, loss)
        if terms is None:
            # gates and beta: heads, or channels of heads
            dims = _SLICES.get(name, tuple(range(2, got.ndim)))
            self._compare(label, got, oracle, budget, "gradient", dims, others)
        else:
            assert_sum_within_budget(label, got, oracle, budget, terms, self.dtype, others)

    def others(self, name: str, loss: str) -> Callable[[], list[Tensor]] | None:
        """Gives a gradient under other roundings, where one set of them may be a lucky one: of a
        parameter, or of gates per head, which share the errors of the states."""
        if name in _PARAMETERS or (name == "g" and self.inputs["g"].ndim == 3):
            return lambda: [_through(x, name, loss) for x in self.other_gradients]
        return None

    def terms(self, name: str, loss: str) -> Tensor | None:
        """For a gradient that is a sum over tokens: its terms in the oracle."""
        return None

    def _compare(self, label, got, oracle, budget, kind, dims, others=None):
        got = got.detach().cpu()
        if self.dtype != torch.float32:
            assert_within_budget(
                *(label, got, oracle, budget, self.dtype, kind),
                dims=dims, least=self.least, others=others,
            )  # fmt: skip
            return
        assert got.shape == oracle.shape and torch.isfinite(got).all(), label
        if got.numel() == 0:
            return
        if oracle.double().square().mean().sqrt() < 1e-6:
            assert got.double().square().mean().sqrt() < 1e-6, f"{label} should be zero"
            return
        assert relative_error(got, oracle) < LIMIT_FP32, label
        assert worst_error(got, oracle, dims) < 10 * LIMIT_FP32, label


def _through(gradients: dict, name: str, loss: str) -> Tensor:
    """The gradient of a name through one output or "both", from those by output."""
    if loss != "both":
        return gradients[loss][name].double()
    return gradients["o"][name].double() + gradients["final_state"][name].double()


def assert_sum_within_budget(
    name: str,
    got: Tensor,
    oracle: Tensor,
    budget: Tensor,
    terms: Tensor,
    dtype: torch.dtype,
    others: Callable[[], list[Tensor]] | None = None,
) -> None:
    """For a gradient that sums ``terms [B, T, ...]`` over tokens, and may cancel.

    Its size is that of the sums of magnitudes: the ceiling of 2e-2 is a share of them, unless
    ``others`` explain more.

    Args:
        oracle, budget: the gradient in the oracle and in the budget reference.
        terms: what the oracle's sums up.
        dtype: of the inputs q, k, v.
        others: see :func:`flaop.testing.assert_within_budget`.
    """
    error = (got.detach().cpu().double() - oracle).norm().item()
    if dtype == torch.float32:
        allowed = LIMIT_FP32 * max(oracle.norm().item(), terms.norm().item())
    else:
        size = max(oracle.norm().item(), terms.abs().sum((0, 1)).norm().item())
        least = 2.0**-22 * size

        def off(x: Tensor) -> float:
            return (x - oracle).norm().item()

        allowed = min(2 * off(budget), 2e-2 * size) + least
        if error > allowed and others is not None:
            allowed = share_of_errors(map(off, (budget, *others()))) + least
    assert error <= allowed + 1e-6, f"{name}: error {error:.3e} is above {allowed:.3e}"


def on_device(inputs: dict, device: str, grad: Sequence[str] = ()) -> dict:
    return {
        name: x.to(device).requires_grad_(name in grad) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }


def check_all(expected: Expected, fn: Callable, device: str) -> None:
    """Without a gradient, and with one through o, through the final state, and through both."""
    with torch.no_grad():
        expected.compare_outputs(*fn(**on_device(expected.inputs, device)))
        without_state = {**expected.inputs, "output_final_state": False}
        expected.compare_outputs(*fn(**on_device(without_state, device)))

    inputs = on_device(expected.inputs, device, expected.names)
    outputs = fn(**inputs)
    expected.compare_outputs(*outputs)
    leaves = [inputs[name] for name in expected.names]
    d_outputs = (expected.d_o.to(device), expected.d_state.to(device))
    for loss, part in (("both", slice(2)), ("o", slice(1)), ("final_state", slice(1, 2))):
        gradients = torch.autograd.grad(
            outputs[part], leaves, d_outputs[part],
            retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        for name, got in zip(expected.names, gradients, strict=True):
            expected.compare_gradient(name, got, loss)


def check_alone(expected: Expected, fn: Callable, device: str) -> None:
    """Each gradient asked for alone, through both outputs."""
    for name in expected.names:
        inputs = on_device(expected.inputs, device, [name])
        o, state = fn(**inputs)
        d_outputs = [expected.d_o.to(device), expected.d_state.to(device)]
        if name == "q":  # the final state does not depend on q
            state, d_outputs = state.detach(), d_outputs[:1]
        outputs = [x for x in (o, state) if x.requires_grad]
        (got,) = torch.autograd.grad(outputs, inputs[name], d_outputs)
        expected.compare_gradient(name, got, "both")


def _gradients(output: Tensor, leaves: dict[str, Tensor], d_output: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(
        output, list(leaves.values()), d_output.to(output.dtype),
        retain_graph=True, allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return dict(zip(leaves, gradients, strict=True))
