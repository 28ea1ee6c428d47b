"""Bad arguments raise before any kernel runs, and say what came and what was expected."""

import pytest
import torch

import flaop
from flaop.testing import kda_inputs
from flaop.validation import checks
from flaop.validation import kda as validation

B, T, H, HV, K, V = 2, 10, 2, 4, 16, 24
FUNCTIONS = [flaop.kda, flaop.chunk_kda, flaop.fused_recurrent_kda]
PACKED = {"B": 1, "lengths": [4, 0, 6]}


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


def arguments(**changes):
    inputs = kda_inputs(B=B, T=T, H=H, HV=HV, K=K, V=V)
    return {**inputs, **changes}


GATE = {"use_gate_in_kernel": True}
# name, changed arguments, error, words of the message
BAD = [
    ("q rank", {"q": empty(T, H, K)}, ValueError, ["q must", "[B, T, H, K]", "[10, 2, 16]"]),
    ("v rank", {"v": empty(B, T, HV)}, ValueError, ["v must", "[B, T, HV, V]", "[2, 10, 4]"]),
    ("k length", {"k": empty(B, T + 1, H, K)}, ValueError, ["k must", "[2, 10, 2, 16]", "11"]),
    ("k heads", {"k": empty(B, T, H + 1, K)}, ValueError, ["k must", "[2, 10, 3, 16]"]),
    ("k channels", {"k": empty(B, T, H, K + 1)}, ValueError, ["k must", "[2, 10, 2, 17]"]),
    ("v batch", {"v": empty(B + 1, T, HV, V)}, ValueError, ["v must", "[3, 10, 4, 24]"]),
    ("v length", {"v": empty(B, T + 1, HV, V)}, ValueError, ["v must", "[2, 11, 4, 24]"]),
    ("v heads", {"v": empty(B, T, 3, V)}, ValueError, ["multiple", "HV = 3", "H = 2"]),
    ("no channel", {"v": empty(B, T, HV, 0)}, ValueError, ["at least one", "[2, 10, 4, 0]"]),
    ("g rank", {"g": empty(B, T, HV)}, ValueError, ["g must", "[2, 10, 4, 16]", "[2, 10, 4]"]),
    ("g heads", {"g": empty(B, T, H, K)}, ValueError, ["g must", "[2, 10, 4, 16]"]),
    ("beta", {"beta": empty(B, T, H)}, ValueError, ["beta must", "[2, 10, 4]", "[2, 10, 2]"]),
    ("k dtype", {"k": empty(B, T, H, K).half()}, TypeError, ["k must", "float32", "float16"]),
    ("v dtype", {"v": empty(B, T, HV, V).bfloat16()}, TypeError, ["v must", "bfloat16"]),
    ("g dtype", {"g": empty(B, T, HV, K).int()}, TypeError, ["g must", "torch.int32"]),
    ("beta dtype", {"beta": empty(B, T, HV).bool()}, TypeError, ["beta must", "torch.bool"]),
    ("g device", {"g": empty(B, T, HV, K).to("meta")}, ValueError, ["g must", "cpu", "meta"]),
    (
        "state batch",
        {"initial_state": empty(B + 1, HV, K, V)},
        ValueError,
        ["initial_state must", "[N, HV, K, V] = [2, 4, 16, 24]", "[3, 4, 16, 24]"],
    ),
    (
        "state layout",
        {"initial_state": empty(B, HV, V, K)},
        ValueError,
        ["initial_state must", "[N, HV, K, V]", "[2, 4, 24, 16]"],
    ),
    (
        "state layout, V first",
        {"initial_state": empty(B, HV, K, V), "state_v_first": True},
        ValueError,
        ["initial_state must", "[N, HV, V, K] = [2, 4, 24, 16]"],
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
    ("A_log missing", GATE, ValueError, ["A_log is needed", "lower_bound", "None"]),
    ("A_log", {**GATE, "A_log": empty(H)}, ValueError, ["A_log must", "[4]", "[2]"]),
    ("A_log dtype", {**GATE, "A_log": empty(HV).long()}, TypeError, ["A_log must", "int64"]),
    ("A_log unused", {"A_log": empty(HV)}, ValueError, ["A_log", "use_gate_in_kernel=True"]),
    (
        "dt_bias",
        {**GATE, "A_log": empty(HV), "dt_bias": empty(HV)},
        ValueError,
        ["dt_bias must", "[64]", "[4]"],
    ),
    (
        "dt_bias, two dimensions",
        {**GATE, "A_log": empty(HV), "dt_bias": empty(K, HV)},
        ValueError,
        ["dt_bias must", "[4, 16]", "[16, 4]"],
    ),
    ("dt_bias unused", {"dt_bias": empty(HV, K)}, ValueError, ["dt_bias", "use_gate_in_kernel"]),
    ("bound unused", {"lower_bound": -5.0}, ValueError, ["lower_bound", "use_gate_in_kernel"]),
    ("bound > 0", {**GATE, "lower_bound": 1.0}, ValueError, ["lower_bound", "at most 0", "1.0"]),
    ("bound NaN", {**GATE, "lower_bound": float("nan")}, ValueError, ["lower_bound", "nan"]),
    (
        "safe_gate without bound",
        {**GATE, "A_log": empty(HV), "safe_gate": True},
        ValueError,
        ["safe_gate", "lower_bound", "None"],
    ),
    (
        "safe_gate, bound too low",
        {**GATE, "lower_bound": -5.5, "safe_gate": True},
        ValueError,
        ["safe_gate", "[-5.0, 0)", "-5.5"],
    ),
    (
        "safe_gate, bound 0",
        {**GATE, "lower_bound": 0.0, "safe_gate": True},
        ValueError,
        ["safe_gate", "[-5.0, 0)", "0.0"],
    ),
    (
        "negative eigenvalues",
        {"allow_neg_eigval": True},
        ValueError,
        ["allow_neg_eigval", "use_beta_sigmoid_in_kernel"],
    ),
    ("scale", {"scale": float("inf")}, ValueError, ["scale must be finite", "inf"]),
]
BAD_HINTS = [
    ({"chunk_size": 48}, ["chunk_size", "(16, 32, 64)", "48"]),
    ({"split_size": 96}, ["split_size", "multiple of chunk_size = 64", "96"]),
    ({"split_size": -64}, ["split_size", "-64"]),
]
BAD_OFFSETS = [
    ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, ["cu_seqlens", "[N + 1]"]),
    ({"cu_seqlens": torch.tensor([[0, 10]])}, ValueError, ["cu_seqlens", "[1, 2]"]),
    ({"cu_seqlens": torch.tensor([0.0, 10.0])}, TypeError, ["cu_seqlens", "float32"]),
    (
        {"initial_state": empty(1, HV, K, V)},
        ValueError,
        ["initial_state must", "[3, 4, 16, 24]", "[1, 4, 16, 24]"],
    ),
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


@pytest.mark.parametrize("changes, words", BAD_HINTS, ids=lambda x: str(x)[:24])
def test_bad_hints(changes, words):
    for function in (flaop.kda, flaop.chunk_kda):
        inputs = arguments(**changes)
        if function is flaop.kda:
            inputs["backend"] = "chunk"
        assert_refused(function, inputs, ValueError, words)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("changes, error, words", BAD_OFFSETS)
def test_bad_packed_arguments(function, changes, error, words):
    inputs = kda_inputs(H=H, HV=HV, K=K, V=V, **PACKED)
    assert_refused(function, {**inputs, **changes}, error, words)


def test_too_many_channels():
    inputs = kda_inputs(T=3, H=1, K=257, V=8)
    assert_refused(flaop.chunk_kda, inputs, ValueError, ["at most 256", "K = 257"])


def test_float64_needs_the_cpu():
    inputs = kda_inputs(T=3, H=1, K=8, V=8, dtype=torch.float64)
    flaop.chunk_kda(**inputs)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        on_cuda = [torch.empty(inputs[n].shape, dtype=torch.float64, device="cuda") for n in "qkvg"]
        beta = torch.empty(1, 3, 1, device="cuda")
        with pytest.raises(TypeError, match="float64 on the CPU only"):
            flaop.chunk_kda(*on_cuda, beta)


def test_unknown_arguments_and_tensors_for_numbers_are_errors():
    inputs = arguments()
    with pytest.raises(TypeError, match="head_first"):
        flaop.kda(**inputs, head_first=True)
    with pytest.raises(TypeError, match="positional"):
        flaop.chunk_kda(*(inputs[n] for n in ("q", "k", "v", "g", "beta")), 0.5)
    with pytest.raises(RuntimeError, match="scale"):
        flaop.chunk_kda(**{**inputs, "scale": torch.tensor([0.5, 0.5])})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_checks_hold_in_every_grad_mode(mode, requires_grad):
    inputs = kda_inputs(B=B, T=T, H=H, HV=HV, K=K, V=V, requires_grad=requires_grad)
    with mode():
        assert_refused(
            flaop.chunk_kda, {**inputs, "k": inputs["k"][:, 1:]}, ValueError, ["k must have shape"]
        )


def test_checks_run_in_the_fake():
    inputs = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments().items()}
    flaop.chunk_kda(**inputs)
    assert_refused(
        flaop.chunk_kda, {**inputs, "k": inputs["k"][:, 1:]}, ValueError, ["k must have shape"]
    )


def test_backward_checks_what_it_is_given():
    inputs = arguments(output_final_state=False)
    shared = [inputs[n] for n in ("q", "k", "v", "g", "beta")]
    o, _, *residuals = torch.ops.flaop.chunk_kda_fwd.default(*shared)

    def backward(d_o, residuals):
        flags = [None, False, False, False, False, False, None, False, 64, 0, False]
        return torch.ops.flaop.chunk_kda_bwd.default(
            d_o, None, *shared, None, None, None, None, *residuals, *flags, [True] * 8
        )

    backward(o, residuals)
    with pytest.raises(ValueError, match="d_o must have shape"):
        backward(o[:, 1:], residuals)
    with pytest.raises(ValueError, match="A must have shape"):
        backward(o, [residuals[0][:, 1:], *residuals[1:]])


def test_call_carries_sizes_and_defaults():
    inputs = kda_inputs(H=H, HV=HV, K=K, V=V, lengths=[3, 0, 70])
    call = validation.check(**inputs)
    assert (call.B, call.T, call.H, call.HV, call.K, call.V, call.N) == (1, 73, H, HV, K, V, 3)
    assert call.scale == K**-0.5
    assert call.rows == 2 + 3 - 1
    assert call.state_shape == (3, HV, K, V)
    assert validation.check(**arguments()).rows == B
    assert call._replace(cu_seqlens=torch.zeros(1), T=0, N=0).rows == 0


class TestDebug:
    """FLAOP_DEBUG=1 reads values; without it none is read."""

    @pytest.fixture(params=[False, True])
    def debug(self, request, monkeypatch):
        monkeypatch.setattr(checks, "DEBUG", request.param)
        return request.param

    def run(self, debug, inputs, message):
        for function in FUNCTIONS:
            if debug:
                with pytest.raises(ValueError, match=message):
                    function(**inputs)
            else:
                function(**inputs)

    def test_positive_gate(self, debug):
        inputs = arguments()
        inputs["g"][0, 3] = 0.5
        self.run(debug, inputs, "g must be at most 0, got 0.5")

    def test_broken_promise_of_safe_gate(self, debug):
        inputs = arguments(safe_gate=True)
        inputs["g"].fill_(-6.0)
        self.run(debug, inputs, r"safe_gate=True promises g in \[-5.0, 0\], got -6.0")

    @pytest.mark.parametrize("offsets", [[0, 7, 5], [0, 5, 11], [-1, 5, 10]])
    def test_offsets(self, debug, offsets):
        inputs = kda_inputs(H=H, K=K, V=V, lengths=[4, 6])
        inputs["cu_seqlens"] = torch.tensor(offsets)
        self.run(debug, inputs, r"cu_seqlens must not decrease and stay in \[0, T = 10\]")
