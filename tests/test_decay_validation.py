"""Bad arguments of the decay families and the stages raise before any kernel runs, and say why."""

import pytest
import torch

import flaop
from flaop.testing import gla_inputs, simple_gla_inputs
from flaop.validation import checks, decay

B, T, H, HV, K, V = 2, 10, 2, 4, 16, 24
SIZES = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}
SIMPLE = [flaop.simple_gla, flaop.chunk_simple_gla, flaop.fused_recurrent_simple_gla]
CHANNEL = [flaop.gla, flaop.chunk_gla, flaop.fused_recurrent_gla]
COMPOSITES = [flaop.retention, flaop.linear_attn, flaop.chunk_retention, flaop.chunk_linear_attn]


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


def inputs_for(function):
    if function in SIMPLE:
        return simple_gla_inputs(**SIZES, gate="both")
    return gla_inputs(**SIZES)


def assert_refused(function, inputs, error, words):
    with pytest.raises(error) as caught:
        function(**inputs)
    for word in words:
        assert word in str(caught.value)


# name, changed arguments, error, words of the message
BAD = [
    ("q rank", {"q": empty(T, H, K)}, ValueError, ["q must", "[B, T, H, K]", "[10, 2, 16]"]),
    ("k length", {"k": empty(B, T + 1, H, K)}, ValueError, ["k must", "[2, 10, 2, 16]", "11"]),
    ("v heads", {"v": empty(B, T, 3, V)}, ValueError, ["multiple", "HV = 3", "H = 2"]),
    ("v dtype", {"v": empty(B, T, HV, V).half()}, TypeError, ["v must", "float32", "float16"]),
    ("g device", {"g": "meta"}, ValueError, ["g must", "cpu", "meta"]),
    ("g dtype", {"g": "int"}, TypeError, ["g must", "torch.int32"]),
    (
        "state batch",
        {"initial_state": empty(B + 1, HV, K, V)},
        ValueError,
        ["initial_state must", "[N, HV, K, V] = [2, 4, 16, 24]", "[3, 4, 16, 24]"],
    ),
    (
        "state layout",
        {"initial_state": empty(B, HV, K, V), "state_v_first": True},
        ValueError,
        ["initial_state must", "[N, HV, V, K] = [2, 4, 24, 16]"],
    ),
    ("state dtype", {"initial_state": empty(B, HV, K, V).double()}, TypeError, ["float64"]),
    ("offsets", {"cu_seqlens": torch.tensor([0, T])}, ValueError, ["cu_seqlens", "batch of one"]),
    ("scale", {"scale": float("nan")}, ValueError, ["scale must be finite", "nan"]),
    ("chunk_size", {"chunk_size": 48}, ValueError, ["chunk_size", "(16, 32, 64)", "48"]),
    (
        "split_size",
        {"split_size": 96},
        ValueError,
        ["split_size", "multiple of chunk_size = 64", "96"],
    ),
    ("negative split_size", {"split_size": -64}, ValueError, ["split_size", "-64"]),
]


@pytest.mark.parametrize("function", SIMPLE + CHANNEL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("changes, error, words", [x[1:] for x in BAD], ids=[x[0] for x in BAD])
def test_bad_arguments(function, changes, error, words):
    inputs = inputs_for(function)
    if changes.get("g") == "meta":
        changes = {"g": inputs["g"].to("meta")}
    elif changes.get("g") == "int":
        changes = {"g": inputs["g"].int()}
    assert_refused(function, {**inputs, **changes}, error, words)


@pytest.mark.parametrize("function", SIMPLE, ids=lambda f: f.__name__)
def test_gates_of_simple_gla(function):
    inputs = inputs_for(function)
    families = ["simple_gla", "[B, T, HV]", "[2, 10, 4, 16]", "gla", "[B, T, HV, K]"]
    assert_refused(function, {**inputs, "g": empty(B, T, HV, K)}, ValueError, families)
    assert_refused(function, {**inputs, "g": empty(B, T, H)}, ValueError, ["g must", "[2, 10, 4]"])
    assert_refused(function, {**inputs, "g_gamma": empty(H)}, ValueError, ["g_gamma must", "[4]"])


@pytest.mark.parametrize("function", CHANNEL, ids=lambda f: f.__name__)
def test_gates_of_gla(function):
    inputs = inputs_for(function)
    families = ["gla", "[B, T, HV, K]", "[2, 10, 4]", "simple_gla", "[B, T, HV]"]
    assert_refused(function, {**inputs, "g": empty(B, T, HV)}, ValueError, families)
    if function is not flaop.chunk_gla:
        words = ["gv must", "[2, 10, 4, 24]", "[2, 10, 4, 16]"]
        assert_refused(function, {**inputs, "gv": empty(B, T, HV, K)}, ValueError, words)


@pytest.mark.parametrize("function", COMPOSITES, ids=lambda f: f.__name__)
def test_composites(function):
    inputs = {n: x for n, x in inputs_for(function).items() if n != "g"}
    function(**inputs)
    words = ["v must have 4 dimensions [B, T, HV, V]"]
    assert_refused(function, {**inputs, "v": empty(B, T, HV)}, ValueError, words)
    assert_refused(function, {**inputs, "split_size": 65}, ValueError, ["split_size", "65"])


@pytest.mark.parametrize("layer_idx, num_layers", [(-1, 4), (4, 4), (0, 0)])
def test_layers_of_lightning_attention(layer_idx, num_layers):
    inputs = {n: x for n, x in inputs_for(flaop.gla).items() if n != "g"}
    words = [f"layer_idx = {layer_idx}", f"num_layers = {num_layers}"]
    inputs |= {"layer_idx": layer_idx, "num_layers": num_layers}
    assert_refused(flaop.lightning_attn, inputs, ValueError, words)


def test_normalised_linear_attention_has_one_more_column_of_state():
    inputs = {n: x for n, x in inputs_for(flaop.gla).items() if n != "g"} | {"normalize": True}
    flaop.linear_attn(**inputs | {"initial_state": torch.zeros(B, HV, K, V + 1)})
    words = ["initial_state must", "[2, 4, 16, 25]", "[2, 4, 16, 24]"]
    assert_refused(
        flaop.linear_attn, {**inputs, "initial_state": empty(B, HV, K, V)}, ValueError, words
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"x": empty(B, T, V)}, ["x must", "[batch, T, heads, headdim]", "[2, 10, 24]"]),
        ({"dt": empty(B, T, H)}, ["dt must", "[2, 10, 2]"]),
        ({"A": empty(H)}, ["A must", "[heads]", "[2]"]),
        ({"B": empty(B, T + 1, H, K)}, ["B and C", "[2, 11, 2, 16]"]),
        ({"C": empty(B, T, H, K + 1)}, ["B and C", "[2, 10, 2, 17]"]),
        ({"D": empty(V)}, ["D must", "[heads, headdim]", "[24]"]),
        ({"z": empty(B, T, HV)}, ["z must", "[2, 10, 4]"]),
        ({"dt_bias": empty(V)}, ["dt_bias must", "[24]"]),
    ],
)
def test_mamba2(changes, words):
    inputs = {
        "x": torch.zeros(B, T, HV, V),
        "dt": torch.zeros(B, T, HV),
        "A": torch.zeros(HV),
        "B": torch.zeros(B, T, H, K),
        "C": torch.zeros(B, T, H, K),
    }
    flaop.mamba2_ssd(**inputs)
    assert_refused(flaop.mamba2_ssd, {**inputs, **changes}, ValueError, words)


KEYS, VALUES = torch.zeros(B, T, H, K), torch.zeros(B, T, HV, V)
STATES = torch.zeros(B, HV, K, V)


@pytest.mark.parametrize(
    "function, inputs, error, words",
    [
        ("cumsum", {"g": empty(B, T)}, ValueError, ["g must", "[B, T, HV, K]", "[2, 10]"]),
        ("cumsum", {"g": empty(B, T, H).int()}, TypeError, ["g must", "int32"]),
        ("cumsum", {"g": empty(B, T, H), "chunk_size": 48}, ValueError, ["chunk_size", "48"]),
        (
            "cumsum",
            {"g": empty(B, T, H), "cu_seqlens": torch.tensor([0, T])},
            ValueError,
            ["batch of one", "g of shape [2, 10, 2]"],
        ),
        ("fwd_h", {"k": KEYS[0]}, ValueError, ["k must", "[B, T, H, K]", "[10, 2, 16]"]),
        ("fwd_h", {"v": VALUES.half()}, TypeError, ["v must", "dtype of k", "float16"]),
        ("fwd_h", {"v": VALUES[:, :, :3]}, ValueError, ["multiple of k's heads", "HV = 3"]),
        ("fwd_h", {"g": empty(B, T, HV, K)}, ValueError, ["g must", "[2, 10, 4]"]),
        ("fwd_h", {"gk": empty(B, T, HV)}, ValueError, ["gk must", "[2, 10, 4, 16]"]),
        ("fwd_h", {"gv": empty(B, T, HV, K)}, ValueError, ["gv must", "[2, 10, 4, 24]"]),
        ("fwd_h", {"split_size": 96}, ValueError, ["split_size", "96"]),
        ("fwd_h", {"initial_state": STATES.mT}, ValueError, ["initial_state must"]),
        ("fwd_o", {"h": STATES[:1]}, ValueError, ["h must", "[R, HV, K, V] = [2, 4, 16, 24]"]),
        ("fwd_o", {"h": STATES.double()}, TypeError, ["h must", "float64"]),
        ("fwd_o", {"g": empty(B, T, H)}, ValueError, ["g must", "[2, 10, 4]", "[2, 10, 2]"]),
        ("fwd_o", {"chunk_size": 8}, ValueError, ["chunk_size", "8"]),
    ],
)
def test_stages(function, inputs, error, words):
    if function == "cumsum":
        inputs = {"chunk_size": 64, **inputs}
        assert_refused(flaop.chunk_local_cumsum, inputs, error, words)
        return
    defaults = {"k": KEYS, "v": VALUES}
    if function == "fwd_o":
        defaults |= {"q": KEYS, "h": STATES}
    function = flaop.chunk_fwd_h if function == "fwd_h" else flaop.chunk_fwd_o
    function(**defaults)
    assert_refused(function, {**defaults, **inputs}, error, words)


def test_call_carries_sizes_and_defaults():
    inputs = gla_inputs(H=H, HV=HV, K=K, V=V, lengths=[3, 0, 70])
    call = decay.check_gla(**inputs, chunk_size=16, split_size=80)
    assert (call.B, call.T, call.H, call.HV, call.K, call.V, call.N) == (1, 73, H, HV, K, V, 3)
    assert call.channel and call.scale == K**-0.5
    assert call.rows == 2 + 3 - 1
    assert call.state_shape == (3, HV, K, V)
    assert call.split_size == 128
    assert not decay.check_simple_gla(**simple_gla_inputs(**SIZES, gate=None)).channel


@pytest.mark.parametrize("name", ["g", "g_gamma"])
def test_positive_gates_under_debug(monkeypatch, name):
    inputs = simple_gla_inputs(**SIZES, gate="both")
    inputs[name][..., 1] = 0.5
    for function in SIMPLE:
        function(**inputs)
    monkeypatch.setattr(checks, "DEBUG", True)
    for function in SIMPLE:
        words = [f"{name} must be at most 0, got 0.5"]
        assert_refused(function, inputs, ValueError, words)


def test_offsets_under_debug(monkeypatch):
    monkeypatch.setattr(checks, "DEBUG", True)
    inputs = gla_inputs(H=H, K=K, V=V, lengths=[4, 6])
    inputs["cu_seqlens"] = torch.tensor([0, 7, 5])
    words = ["cu_seqlens must not decrease", "[0, 7, 5]"]
    for function in CHANNEL:
        assert_refused(function, inputs, ValueError, words)
    sums = {"g": inputs["g"], "chunk_size": 64, "cu_seqlens": inputs["cu_seqlens"]}
    assert_refused(flaop.chunk_local_cumsum, sums, ValueError, words)
