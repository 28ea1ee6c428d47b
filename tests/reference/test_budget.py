"""Error budgets: the rounded formula is the formula, and the assertions catch what they must."""

import pytest
import torch

from flaop.testing import (
    assert_within_budget,
    chunk_budget_reference,
    decay_budget_reference,
    gla_inputs,
    gla_oracle,
    kda_inputs,
    kda_oracle,
    pairwise,
    relative_error,
    simple_gla_inputs,
    simple_gla_oracle,
    worst_error,
)

INPUTS = ("q", "k", "v", "g", "g_gamma", "gv", "beta", "A_log", "dt_bias", "initial_state")


def with_gradients(function, kwargs, d_o, d_final_state):
    inputs = {name: kwargs[name] for name in INPUTS if kwargs.get(name) is not None}
    o, final_state = function(**kwargs)
    d_o, d_final_state = d_o.to(o.dtype), d_final_state.to(final_state.dtype)
    gradients = torch.autograd.grad((o, final_state), inputs.values(), (d_o, d_final_state))
    return {"o": o, "final_state": final_state, **dict(zip(inputs, gradients))}


def gradients_for(kwargs, dtype):
    return torch.randn_like(kwargs["v"]), torch.randn(kwargs["initial_state"].shape, dtype=dtype)


@pytest.mark.parametrize(
    "case",
    pairwise(
        gate_in_kernel=(None, "softplus", "bounded"),
        lengths=(None, [65, 0, 1, 30]),
        HV=(1, 2),
        state_v_first=(False, True),
        l2norm=(False, True),
        neg_eigval=(False, True),
    ),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_without_rounding_it_is_the_recurrence(case):
    kwargs = kda_inputs(
        T=100, H=1, K=20, V=16, dtype=torch.float64, initial_state=True, requires_grad=True, **case
    )
    d = gradients_for(kwargs, torch.float64)
    expected = with_gradients(kda_oracle, kwargs, *d)
    for name, got in with_gradients(chunk_budget_reference, kwargs, *d).items():
        assert relative_error(got, expected[name]) < 1e-10, name


def decay_inputs(gate, **options):
    if gate in ("channel", "channel and value"):
        return gla_oracle, gla_inputs(value_gate=gate != "channel", **options)
    return simple_gla_oracle, simple_gla_inputs(gate=gate, **options)


@pytest.mark.parametrize(
    "case",
    pairwise(
        gate=("g", "g_gamma", "both", None, "channel", "channel and value"),
        lengths=(None, [65, 0, 1, 30]),
        HV=(1, 2),
        state_v_first=(False, True),
    ),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_without_rounding_it_is_the_recurrence_of_the_decay_families(case):
    oracle, kwargs = decay_inputs(
        **{"T": 100, "H": 1, "K": 20, "V": 16, "dtype": torch.float64, **case},
        initial_state=True,
        requires_grad=True,
    )
    d = gradients_for(kwargs, torch.float64)
    expected = with_gradients(oracle, kwargs, *d)
    for name, got in with_gradients(decay_budget_reference, kwargs, *d).items():
        assert relative_error(got, expected[name]) < 1e-10, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "gate, gates",
    # not fast gates per head: the last key of a chunk is not rounded, and little else is left
    [("g", "mixed"), ("g", "slow"), *[("channel", gates) for gates in ("mixed", "fast", "slow")]],
)
def test_rounding_of_the_decay_families_costs_about_its_precision(gate, gates, dtype):
    oracle, kwargs = decay_inputs(
        gate, T=300, dtype=dtype, gates=gates, initial_state=True, requires_grad=True
    )
    d = gradients_for(kwargs, torch.float32)
    expected = with_gradients(oracle, kwargs, *d)
    eps = torch.finfo(dtype).eps
    for name, got in with_gradients(decay_budget_reference, kwargs, *d).items():
        # the closed form of the gate's gradient cancels where gates are fast
        bound = 5 if name == "g" else 1.5
        assert 0.05 * eps < relative_error(got, expected[name]) < bound * eps, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gates", ["mixed", "fast", "slow"])
def test_rounding_costs_about_its_precision(dtype, gates):
    kwargs = kda_inputs(
        T=300, K=64, V=64, dtype=dtype, gates=gates, initial_state=True, requires_grad=True
    )
    d = gradients_for(kwargs, torch.float32)
    expected = with_gradients(kda_oracle, kwargs, *d)
    eps = torch.finfo(dtype).eps
    for name, got in with_gradients(chunk_budget_reference, kwargs, *d).items():
        assert 0.05 * eps < relative_error(got, expected[name]) < 1.5 * eps, name


def test_states_beyond_float16_stay_finite():
    kwargs = kda_inputs(T=100, K=16, V=16, dtype=torch.float16, gates="slow", initial_state=True)
    kwargs["initial_state"] *= 1e6
    _, final_state = chunk_budget_reference(**kwargs)
    assert relative_error(final_state, kda_oracle(**kwargs)[1]) < 1e-2


class TestAssertWithinBudget:
    """Each kind of wrong result is caught."""

    oracle = torch.linspace(1, 2, 4 * 50 * 8, dtype=torch.float64).reshape(1, 50, 4, 8)
    budget_ref = (oracle * 1.002).bfloat16()

    def check(self, got, **options):
        dtype = torch.bfloat16
        assert_within_budget("o", got.bfloat16(), self.oracle, self.budget_ref, dtype, **options)

    def test_right(self):
        self.check(self.oracle, dims=(0, 1, 2))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_one_element_not_finite(self, value):
        got = self.oracle.clone()
        got[0, 3, 2, 1] = value
        with pytest.raises(AssertionError, match="1 of 1600 elements are not finite"):
            self.check(got)

    def test_shape(self):
        with pytest.raises(AssertionError, match="shape"):
            self.check(self.oracle[:, :-1])

    def test_ceiling(self):
        self.check(self.oracle * 1.015, kind="gradient")
        with pytest.raises(AssertionError, match="is above 1.000e-02"):
            self.check(self.oracle * 1.015)

    def test_one_wrong_row(self):
        got = self.oracle.clone()
        got[0, 30, 2] *= 1.08
        self.check(got)
        with pytest.raises(AssertionError, match=r"worst error along dimensions \(0, 1, 2\)"):
            self.check(got, dims=(0, 1, 2))

    def test_zero_oracle(self):
        zero = torch.zeros(5)
        assert_within_budget("dg", zero + 1e-7, zero, zero, torch.float32, "gradient")
        with pytest.raises(AssertionError, match="should be zero"):
            assert_within_budget("dg", zero + 1e-5, zero, zero, torch.float32, "gradient")


def test_errors():
    ref = torch.ones(2, 3)
    assert relative_error(ref, ref) == 0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == float("inf")
    assert relative_error(torch.full((2,), torch.nan), torch.ones(2)) == float("inf")
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(ref, ref[:1])
    wrong = ref.clone()
    wrong[1] = 1.1
    assert worst_error(wrong, ref, (0,)) == pytest.approx(0.1)
    assert worst_error(wrong, ref, (1,)) == pytest.approx(0.1 / 2**0.5)


def test_pairwise_lets_all_pairs_meet():
    axes = {"a": (1, 2, 3), "b": "xy", "c": (None, True), "d": (4, 5, 6, 7)}
    cases = pairwise(**axes)
    assert len(cases) < 20
    for first in axes:
        for second in axes:
            met = {(case[first], case[second]) for case in cases}
            assert first == second or len(met) == len(axes[first]) * len(axes[second])
