"""The gated delta rule, the delta rule and their stages: bad arguments raise before any kernel
runs and say what to use instead; which path a call takes; what has a gradient and what refuses one.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flaop
from flaop.testing import gdn_inputs, gdn_oracle, relative_error
from flaop.validation import checks
from flaop.validation import gated_delta_rule as validation

B, T, H, HV, K, V = 2, 10, 2, 4, 16, 24
FUNCTIONS = [
    flaop.gated_delta_rule,
    flaop.chunk_gated_delta_rule,
    flaop.fused_recurrent_gated_delta_rule,
]
DELTA_RULES = [flaop.delta_rule, flaop.chunk_delta_rule, flaop.fused_recurrent_delta_rule]


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


def arguments(**changes):
    return {**gdn_inputs(B=B, T=T, H=H, HV=HV, K=K, V=V), **changes}


GATE = {"use_gate_in_kernel": True}
# name, changed arguments, error, words of the message
BAD = [
    ("q rank", {"q": empty(T, H, K)}, ValueError, ["q must", "[B, T, H, K]", "[10, 2, 16]"]),
    ("k length", {"k": empty(B, T + 1, H, K)}, ValueError, ["k must", "[2, 10, 2, 16]", "11"]),
    ("v heads", {"v": empty(B, T, 3, V)}, ValueError, ["multiple", "HV = 3", "H = 2"]),
    ("g with channels", {"g": empty(B, T, HV, K)}, ValueError, ["[B, T, HV]", "is kda"]),
    ("g heads", {"g": empty(B, T, H)}, ValueError, ["g must", "[2, 10, 4]", "[2, 10, 2]"]),
    ("beta", {"beta": empty(B, T, H)}, ValueError, ["beta must", "[2, 10, 4]", "[2, 10, 2]"]),
    ("k dtype", {"k": empty(B, T, H, K).half()}, TypeError, ["k must", "float32", "float16"]),
    ("g dtype", {"g": empty(B, T, HV).int()}, TypeError, ["g must", "torch.int32"]),
    ("beta dtype", {"beta": empty(B, T, HV).bool()}, TypeError, ["beta must", "torch.bool"]),
    ("g device", {"g": empty(B, T, HV).to("meta")}, ValueError, ["g must", "cpu", "meta"]),
    (
        "state layout",
        {"initial_state": empty(B, HV, V, K)},
        ValueError,
        ["initial_state must", "[N, HV, K, V]", "[2, 4, 24, 16]"],
    ),
    (
        "state dtype",
        {"initial_state": empty(B, HV, K, V).double()},
        TypeError,
        ["initial_state must", "float64"],
    ),
    (
        "offsets with a batch",
        {"cu_seqlens": torch.tensor([0, T])},
        ValueError,
        ["cu_seqlens", "batch of one", "[2, 10, 2, 16]"],
    ),
    ("A_log missing", GATE, ValueError, ["A_log is needed", "None"]),
    ("g missing", {**GATE, "g": None, "A_log": empty(HV)}, ValueError, ["g is needed", "None"]),
    ("A_log", {**GATE, "A_log": empty(H)}, ValueError, ["A_log must", "[4]", "[2]"]),
    ("A_log dtype", {**GATE, "A_log": empty(HV).long()}, TypeError, ["A_log must", "int64"]),
    ("A_log unused", {"A_log": empty(HV)}, ValueError, ["A_log", "use_gate_in_kernel=True"]),
    (
        "dt_bias",
        {**GATE, "A_log": empty(HV), "dt_bias": empty(HV, K)},
        ValueError,
        ["dt_bias must", "[4]", "[4, 16]"],
    ),
    ("dt_bias unused", {"dt_bias": empty(HV)}, ValueError, ["dt_bias", "use_gate_in_kernel"]),
    (
        "negative eigenvalues",
        {"allow_neg_eigval": True},
        ValueError,
        ["allow_neg_eigval", "use_beta_sigmoid_in_kernel"],
    ),
    ("scale", {"scale": float("inf")}, ValueError, ["scale must be finite", "inf"]),
    ("chunk_size", {"chunk_size": 48}, ValueError, ["chunk_size", "(16, 32, 64)", "48"]),
    ("split_size", {"split_size": 96}, ValueError, ["split_size", "multiple", "96"]),
]


def assert_refused(function, inputs, error, words):
    with pytest.raises(error) as caught:
        function(**inputs)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("changes, error, words", [x[1:] for x in BAD], ids=[x[0] for x in BAD])
def test_bad_arguments(function, changes, error, words):
    assert_refused(function, arguments(**changes), error, words)


@pytest.mark.parametrize("function", [*FUNCTIONS, *DELTA_RULES], ids=lambda f: f.__name__)
def test_too_many_channels(function):
    inputs = gdn_inputs(T=3, H=1, K=257, V=8)
    names = ("q", "k", "v", "beta") if function in DELTA_RULES else ("q", "k", "v", "g", "beta")
    inputs = {name: inputs[name] for name in names}
    words = ["at most 256", "K = 257", "simple_gla and gla"]
    assert_refused(function, inputs, ValueError, words)


def test_unknown_arguments_are_errors():
    with pytest.raises(TypeError, match="lower_bound"):
        flaop.gated_delta_rule(**arguments(), lower_bound=-5.0)
    with pytest.raises(TypeError, match="A_log"):
        flaop.delta_rule(*(arguments()[n] for n in ("q", "k", "v", "beta")), A_log=empty(HV))


def test_checks_run_in_the_fake():
    inputs = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments().items()}
    flaop.chunk_gated_delta_rule(**inputs)
    inputs["k"] = inputs["k"][:, 1:]
    assert_refused(flaop.chunk_gated_delta_rule, inputs, ValueError, ["k must have shape"])


def test_call_carries_sizes_and_defaults():
    call = validation.check(**gdn_inputs(H=H, HV=HV, K=K, V=V, lengths=[3, 0, 70]))
    assert (call.B, call.T, call.H, call.HV, call.K, call.V, call.N) == (1, 73, H, HV, K, V, 3)
    assert call.scale == K**-0.5
    assert call.rows == 2 + 3 - 1
    assert call.state_shape == (3, HV, K, V)
    assert call.lower_bound is None and not call.safe_gate


@pytest.mark.parametrize("debug", [False, True])
def test_debug_reads_values(debug, monkeypatch):
    monkeypatch.setattr(checks, "DEBUG", debug)
    inputs = arguments()
    inputs["g"][0, 3] = 0.5
    for function in FUNCTIONS:
        if debug:
            assert_refused(function, inputs, ValueError, ["g must be at most 0, got 0.5"])
        else:
            function(**inputs)


# The stages


def of_stage(name, changes):
    k, v, A = empty(B, T, H, K), empty(B, T, HV, V), empty(B, T, HV, 16)
    inputs = {
        "solve_tril": {"L": A},
        "recompute_w_u": {"k": k, "v": v, "beta": empty(B, T, HV), "A": A},
        "chunk_delta_fwd_h": {"k": k, "w": empty(B, T, HV, K), "u": v},
    }[name]
    return {**inputs, **changes}


WIDE = {"k": empty(B, T, H, 257)}
BAD_STAGES = [
    ("solve_tril", {"L": empty(B, T, 48)}, ValueError, ["L must", "[B, T, H, BT]"]),
    (
        "solve_tril",
        {"L": empty(B, T, HV, 48)},
        ValueError,
        ["(16, 32, 64)", "[2, 10, 4, 48]", "torch.linalg.solve_triangular"],
    ),
    ("solve_tril", {"L": empty(B, T, HV, 16).int()}, TypeError, ["L must", "int32"]),
    ("solve_tril", {"cu_seqlens": torch.tensor([0, T])}, ValueError, ["batch of one", "got L"]),
    ("recompute_w_u", {"A": empty(B, T, HV, 8)}, ValueError, ["A must", "(16, 32, 64)"]),
    ("recompute_w_u", {"A": empty(B, T, H, 16)}, ValueError, ["A must", "[2, 10, 4, 16]"]),
    ("recompute_w_u", {"beta": empty(B, T, H)}, ValueError, ["beta must", "[2, 10, 4]"]),
    ("recompute_w_u", {"g": empty(B, T, HV, K)}, ValueError, ["g must", "[2, 10, 4]"]),
    ("recompute_w_u", {"gk": empty(B, T, HV)}, ValueError, ["gk must", "[2, 10, 4, 16]"]),
    ("recompute_w_u", WIDE, ValueError, ["at most 256", "K = 257"]),
    ("chunk_delta_fwd_h", {"w": empty(B, T, H, K)}, ValueError, ["w must", "[2, 10, 4, 16]"]),
    ("chunk_delta_fwd_h", {"u": empty(B, T, HV, V).half()}, TypeError, ["u must", "float16"]),
    ("chunk_delta_fwd_h", {"u": empty(B, T, 3, V)}, ValueError, ["u must", "HV = 3"]),
    ("chunk_delta_fwd_h", {"chunk_size": 48}, ValueError, ["chunk_size", "48"]),
    ("chunk_delta_fwd_h", {**WIDE, "w": empty(B, T, HV, 257)}, ValueError, ["at most 256"]),
]


@pytest.mark.parametrize("name, changes, error, words", BAD_STAGES)
def test_bad_arguments_of_stages(name, changes, error, words):
    assert_refused(getattr(flaop, name), of_stage(name, changes), error, words)


# Which path a call takes


class Recorder(TorchDispatchMode):
    """Names of the flaop ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "flaop":
            self.names.append(op._schema.name.removeprefix("flaop::"))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("T, path", [(64, "fused_recurrent"), (65, "chunk")])
@pytest.mark.parametrize("name", ["gated_delta_rule", "delta_rule"])
def test_paths(name, T, path):
    inputs = gdn_inputs(T=T, H=1, K=16, V=8)
    names = ("q", "k", "v", "beta") if name == "delta_rule" else ("q", "k", "v", "g", "beta")
    values = [inputs[n] for n in names]
    fn = getattr(flaop, name)
    with torch.no_grad(), Recorder() as recorder:
        fn(*values)
    assert recorder.names == [f"{path}_gated_delta_rule"]
    explanation = flaop.explain(fn, *values)
    assert explanation.path == path
    assert "the family is not KDA" in explanation.passed_over[0]
    for forced in ("chunk", "fused_recurrent"):
        assert flaop.supports(forced, fn, *values)
        with flaop.backend(forced), torch.no_grad(), Recorder() as recorder:
            fn(*values)
        assert recorder.names == [f"{forced}_gated_delta_rule"]
    assert not flaop.supports("flash_kda", fn, *values)
    with pytest.raises(ValueError, match="flash_kda cannot serve this call"):
        fn(*values, backend="flash_kda")


# The autograd and autocast kernels


@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
def test_gradcheck(kind):
    inputs = gdn_inputs(
        T=5, H=1, HV=2, K=3, V=2, dtype=torch.float64, gate="softplus", initial_state=True
    )
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    tensors = tuple(inputs[name].requires_grad_() for name in names)

    def call(*values):
        return flaop.gdn(**{**inputs, **dict(zip(names, values))}, backend=kind)

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
def test_what_has_no_gradient_refuses_one(kind):
    inputs = gdn_inputs(T=5, H=1, K=8, V=8, requires_grad=True)
    values = [inputs[n] for n in ("q", "k", "v", "g", "beta")]
    name = f"{kind}_gated_delta_rule_fwd"
    with pytest.raises(NotImplementedError, match=f"{name} is not differentiable: .*flaop::"):
        getattr(torch.ops.flaop, name).default(*values)
    o, _ = flaop.gated_delta_rule(*values, backend=kind)
    with pytest.raises(NotImplementedError, match="no double backward"):
        torch.autograd.grad(o.sum(), inputs["q"], create_graph=True)


@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("shape", [(2, 0), (0, 5)], ids=["no token", "no batch"])
def test_empty_calls_pass_the_state_on(kind, shape):
    inputs = gdn_inputs(B=2, T=5, H=1, K=8, V=8, initial_state=True, state_v_first=True)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name][: shape[0], : shape[1]].detach().requires_grad_()
    inputs["initial_state"] = inputs["initial_state"][: shape[0]].bfloat16().requires_grad_()
    o, state = flaop.gated_delta_rule(**inputs, backend=kind)
    assert o.shape == (*shape, 1, 8)
    assert torch.equal(state, inputs["initial_state"].float())
    (o.sum() + 2 * state.sum()).backward()
    assert (inputs["initial_state"].grad == 2).all()
    assert inputs["g"].grad.shape == inputs["g"].shape


@pytest.mark.parametrize("name", ["gated_delta_rule", "chunk_gated_delta_rule", "delta_rule"])
def test_autocast_casts_q_k_v_only(name):
    inputs = gdn_inputs(T=70, H=1, K=16, V=8, initial_state=True, requires_grad=True)
    if name == "delta_rule":
        inputs = {n: inputs[n] for n in ("q", "k", "v", "beta", "initial_state")}
        inputs["output_final_state"] = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = getattr(flaop, name)(**inputs)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    o.float().sum().backward()
    assert inputs["q"].grad.dtype == inputs["beta"].grad.dtype == torch.float32
    want = gdn_oracle(**{"g": None, **inputs})[0]
    assert 1e-4 < relative_error(o, want) < 1e-2
