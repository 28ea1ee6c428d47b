"""KDA against the float64 token loop: outputs, states and each gradient, within budget."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

import flaop
from flaop.testing import (
    assert_within_budget,
    chunk_budget_reference,
    kda_oracle,
    relative_error,
    worst_error,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory", "single_thread")

PATHS = {"chunk": flaop.chunk_kda, "fused_recurrent": flaop.fused_recurrent_kda}
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
# Dimensions whose slices are compared one by one: rows of heads, channels, heads of a state.
SLICES = {
    "o": (0, 1, 2), "q": (0, 1, 2), "k": (0, 1, 2), "v": (0, 1, 2), "g": (2, 3), "beta": (2,),
    "final_state": (0, 1), "initial_state": (0, 1),
}  # fmt: skip
LIMIT_FP32 = 1e-4

FACTORS = {
    "T": (1, 63, 64, 65, 130, 1000),
    "K": (60, 64, 100, 128, 256),
    "V": (24, 128),
    "dtype": ("float32", "bfloat16", "float16"),
    "gates": ("fast", "slow", "mixed"),
    "gate_in_kernel": (None, "softplus", "bounded"),
    "heads": ((2, 2), (1, 2), (2, 4)),
    "packed": (False, True),
    "initial_state": (False, True),
    "state_v_first": (False, True),
    "l2norm": (False, True),
    "beta": ("plain", "sigmoid", "negative"),
}


def covering_set(factors):
    """Rows in which every value of every factor meets every value of every other one."""
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    order = [pair for a, b in itertools.combinations(names, 2)
             for pair in itertools.product(((a, x) for x in factors[a]),
                                           ((b, y) for y in factors[b]))]  # fmt: skip
    rows = []
    for seed in order:
        if seed not in missing:
            continue
        row = dict(seed)
        for name in names:
            if name not in row:
                row[name] = max(
                    factors[name], key=lambda x: len(_pairs(row | {name: x}, names) & missing)
                )
        missing -= _pairs(row, names)
        rows.append(tuple(row[name] for name in names))
    return rows


def _pairs(row, names):
    items = [(name, row[name]) for name in names if name in row]
    return set(itertools.combinations(items, 2))


def packed_lengths(T):
    """Empty sequences, one of one token, and two that share the rest."""
    lengths = [0, 1, 0, (T - 1) // 3, T - 1 - (T - 1) // 3]
    return lengths if T > 1 else [0, 1, 0]


def options_of(row):
    """The arguments of kda_inputs for a row of the covering set."""
    options = dict(zip(FACTORS, row, strict=True))
    H, HV = options.pop("heads")
    if options["T"] == 1000:  # the token loop keeps a state for each token
        H, HV = 1, HV // H
    beta = options.pop("beta")
    options |= {"H": H, "HV": HV, "beta_sigmoid": beta != "plain", "neg_eigval": beta == "negative"}
    if options.pop("packed"):
        options["lengths"] = packed_lengths(options["T"])
    elif options["T"] < 1000:
        options["B"] = 2
    return options


ROWS = covering_set(FACTORS)
# On CUDA: lengths and regimes within the options that are compiled together.
FAMILY_CASES = [
    *[("main", {"T": T, "gates": gates})
      for T, gates in ((1, "mixed"), (63, "slow"), (64, "fast"), (65, "mixed"), (1000, "mixed"))],
    ("main", {"B": 2, "T": 130, "gates": "slow"}),
    ("packed", {"lengths": [0, 1, 40, 0, 89], "gates": "mixed"}),
    ("packed", {"lengths": [64, 1, 935, 0], "gates": "slow"}),
    ("packed", {"lengths": [0, 1, 0], "gates": "fast"}),
    ("softplus", {"B": 2, "T": 130, "gates": "mixed"}),
    ("softplus", {"T": 1000, "gates": "fast"}),
    ("plain", {"gates": "mixed"}),
    ("plain", {"lengths": [300, 0, 1, 65], "gates": "slow"}),
    ("wide", {"T": 130, "gates": "mixed"}),
    ("wide", {"B": 2, "T": 64, "gates": "slow"}),
    ("odd", {"gates": "slow"}),
    ("odd", {"lengths": [65, 0, 130], "gates": "mixed"}),
]  # fmt: skip


def test_the_covering_set_is_one():
    names = list(FACTORS)
    for (i, a), (j, b) in itertools.combinations(enumerate(names), 2):
        met = {(row[i], row[j]) for row in ROWS}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b]))
    assert len(ROWS) < 50


class Expected:
    """Outputs and gradients of the token loop and of the budget reference on the same inputs."""

    def __init__(self, inputs):
        self.inputs = inputs
        self.dtype = inputs["q"].dtype
        self.names = [name for name in INPUTS if inputs[name] is not None]
        generator = torch.Generator().manual_seed(1)
        self.values, self.gradients = [], []
        for fn in (kda_oracle, chunk_budget_reference):
            leaves = {n: inputs[n].detach().requires_grad_() for n in self.names}
            o, state = fn(**{**inputs, **leaves})
            if not self.values:
                self.d_o = torch.randn(o.shape, generator=generator).to(self.dtype)
                self.d_state = torch.randn(state.shape, generator=generator)
            self.values.append({"o": o.detach(), "final_state": state.detach()})
            self.gradients.append(
                {
                    output: self._gradients(x, list(leaves.values()), d)
                    for output, x, d in (("o", o, self.d_o), ("final_state", state, self.d_state))
                }
            )

    def _gradients(self, output, leaves, d_output):
        """In float64: leaves of 16 bit would round what is compared."""
        return dict(
            zip(
                self.names,
                torch.autograd.grad(
                    output, leaves, d_output.to(output.dtype),
                    retain_graph=True, allow_unused=True, materialize_grads=True,
                ),
                strict=True,
            )
        )  # fmt: skip

    def gradient(self, which, name, loss):
        parts = self.gradients[which]
        if loss != "both":
            return parts[loss][name].double()
        return parts["o"][name].double() + parts["final_state"][name].double()

    def compare_outputs(self, o, state):
        for name, got in (("o", o), ("final_state", state)):
            if got is not None:
                oracle, budget = (values[name] for values in self.values)
                self._compare(name, got, oracle, budget, "output", SLICES[name])

    def compare_gradient(self, name, got, loss):
        assert got.dtype == self.inputs[name].dtype, name
        oracle, budget = (self.gradient(i, name, loss) for i in (0, 1))
        label = f"gradient of {name} through {loss}"
        if name in ("A_log", "dt_bias"):
            self._compare_sum(label, name, got, oracle, budget, loss)
        else:
            self._compare(label, got, oracle, budget, "gradient", SLICES[name])

    def _compare(self, label, got, oracle, budget, kind, dims):
        got = got.detach().cpu()
        if self.dtype != torch.float32:
            assert_within_budget(label, got, oracle, budget, self.dtype, kind, dims=dims)
            return
        assert got.shape == oracle.shape and torch.isfinite(got).all(), label
        if got.numel() == 0:
            return
        if oracle.double().square().mean().sqrt() < 1e-6:
            assert got.double().square().mean().sqrt() < 1e-6, f"{label} should be zero"
            return
        assert relative_error(got, oracle) < LIMIT_FP32, label
        assert worst_error(got, oracle, dims) < 10 * LIMIT_FP32, label

    def _compare_sum(self, label, name, got, oracle, budget, loss):
        """A sum that cancels has the rounding of what it sums up: the gradient of the raw gate,
        whose errors are alike within a channel, since they come from a state that tokens share."""
        terms, rounded = (self.gradient(i, "g", loss) for i in (0, 1))
        if name == "A_log":
            x = self.inputs["g"].double() + self.inputs["dt_bias"].double()
            bounded = self.inputs["lower_bound"] is not None
            factor = x if bounded else F.softplus(x) / torch.sigmoid(x)
            terms, rounded = terms * factor, rounded * factor
        size = torch.maximum(oracle.norm(), terms.norm())
        if self.dtype == torch.float32:
            allowed = LIMIT_FP32 * size
        else:
            channels = (rounded - terms).sum((0, 1)).norm()
            allowed = 2 * (budget - oracle).norm() + 2 * channels
            allowed = torch.minimum(allowed + 2.0**-22 * size, 2e-2 * size)
        error = (got.detach().cpu().double() - oracle).norm()
        assert error <= allowed + 1e-6, f"{label}: error {error:.3e} is above {allowed:.3e}"


@functools.cache
def covering_case(row, make):
    return Expected(make(None, **options_of(row)))


@functools.cache
def family_case(index, make):
    family, changes = FAMILY_CASES[index]
    return Expected(make(family, **changes))


def on_device(inputs, device, grad=()):
    return {
        name: x.to(device).requires_grad_(name in grad) if isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }


def check_all(expected, fn, device):
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


# The covering set has options of its own in each row: on CUDA that takes long to compile.
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)).replace(" ", ""))
@pytest.mark.parametrize(
    "where", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])]
)
def test_covering_set(where, row, path, arguments):
    check_all(covering_case(row, arguments), PATHS[path], where)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("index", range(len(FAMILY_CASES)))
def test_families(index, path, arguments, compiled_families):
    check_all(family_case(index, arguments), PATHS[path], "cuda")


@pytest.mark.parametrize("T", [20, 64, 65, 130])
def test_dispatcher(device, T, arguments):
    """Both sides of the threshold."""
    expected = Expected(arguments("main", T=T))
    check_all(expected, flaop.kda, device)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["main", "packed"])
def test_each_gradient_asked_for_alone(device, family, path, arguments):
    expected = Expected(arguments(family))
    for name in expected.names:
        inputs = on_device(expected.inputs, device, [name])
        o, state = PATHS[path](**inputs)
        d_outputs = [expected.d_o.to(device), expected.d_state.to(device)]
        if name == "q":  # the final state does not depend on q
            state, d_outputs = state.detach(), d_outputs[:1]
        outputs = [x for x in (o, state) if x.requires_grad]
        (got,) = torch.autograd.grad(outputs, inputs[name], d_outputs)
        expected.compare_gradient(name, got, "both")
