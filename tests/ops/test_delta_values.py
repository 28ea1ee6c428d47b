"""The gated delta rule and the delta rule against the float64 token loop: outputs, states and each
gradient, within budget.
"""

import functools

import pytest
import torch

import flaop
from flaop.testing import pairwise
from flaop.testing.comparison import check_all, check_alone
from flaop.testing.expected import DeltaExpected

pytestmark = pytest.mark.usefixtures("poisoned_memory", "single_thread")

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
KINDS = ("chunk", "fused_recurrent")
FACTORS = {
    "T": (1, 63, 64, 65, 130, 1000),
    "K": (16, 60, 64, 100, 128, 256),
    "V": (24, 128),
    "dtype": ("float32", "bfloat16", "float16"),
    "head_gate": ("g", "softplus", None),
    "gates": ("fast", "slow", "mixed"),
    "heads": ((2, 2), (1, 2), (2, 4)),
    "packed": (False, True),
    "initial_state": (False, True),
    "state_v_first": (False, True),
    "l2norm": (False, True),
    "beta": ("plain", "sigmoid", "negative"),
    "dt_bias": (True, False),
}
CASES = pairwise(**FACTORS)
# On CUDA: lengths and regimes within the options that are compiled together.
FAMILY_CASES = [
    *[("delta main", {"T": T, "gates": gates})
      for T, gates in ((1, "mixed"), (63, "slow"), (64, "fast"), (65, "mixed"), (1000, "mixed"))],
    ("delta main", {"B": 2, "T": 130, "gates": "slow"}),
    ("delta packed", {"lengths": [0, 1, 40, 0, 89], "gates": "mixed"}),
    ("delta packed", {"lengths": [64, 1, 935, 0], "gates": "slow"}),
    ("delta packed", {"lengths": [0, 1, 0], "gates": "fast"}),
    ("delta given gate", {"B": 2, "T": 130, "gates": "mixed"}),
    ("delta given gate", {"T": 1000, "gates": "slow"}),
    ("delta without gate", {}),
    ("delta without gate", {"lengths": [300, 0, 1, 65]}),
    ("delta wide", {"T": 130, "gates": "mixed"}),
    ("delta wide", {"B": 2, "T": 64, "gates": "slow"}),
    ("delta odd", {"gates": "slow"}),
    ("delta odd", {"lengths": [65, 0, 130], "gates": "mixed"}),
]  # fmt: skip


def op(kind):
    return getattr(flaop, f"{kind}_gated_delta_rule")


def options_of(case):
    """The options of a case of the covering set."""
    options = dict(case)
    H, HV = options.pop("heads")
    T = options["T"]
    if T == 1000:  # the token loop keeps a state for each token
        H, HV = 1, HV // H
    beta = options.pop("beta")
    if options.pop("packed"):
        # empty sequences, one of one token, and two that share the rest
        options["lengths"] = [0, 1, 0, (T - 1) // 3, T - 1 - (T - 1) // 3]
    elif T < 1000:
        options["B"] = 2
    betas = {"beta_sigmoid": beta != "plain", "neg_eigval": beta == "negative"}
    return options | {"H": H, "HV": HV} | betas


@functools.cache
def covering_case(index, make):
    return DeltaExpected(make(None, **options_of(CASES[index])))


@functools.cache
def family_case(index, make):
    family, changes = FAMILY_CASES[index]
    return DeltaExpected(make(family, **changes))


def id_of(index):
    return "-".join(str(x).replace(" ", "") for x in CASES[index].values())


# The covering set has options of its own in each case: on CUDA that takes long to compile.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(CASES)), ids=id_of)
@pytest.mark.parametrize(
    "where", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])]
)
def test_covering_set(where, index, kind, arguments):
    check_all(covering_case(index, arguments), op(kind), where)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(FAMILY_CASES)))
def test_families(index, kind, arguments, compiled_families):
    check_all(family_case(index, arguments), op(kind), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["delta main", "delta packed"])
def test_tiles_of_large_batches(
    family, arguments, compiled_families, monkeypatch, fresh_launches
):
    """Where sequences and heads fill the GPU, the scans take wider tiles."""
    monkeypatch.setattr("flaop.launch.delta.gdn_stages.processors", lambda device: 0)
    check_all(DeltaExpected(arguments(family)), flaop.chunk_gated_delta_rule, "cuda")


# Tiles of 64 and 128 columns, full and ragged chunks.
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("T", [64, 100, 1500])
@pytest.mark.parametrize("family", ["delta main", "delta given gate", "delta wide"])
def test_gradients_at_several_seeds(family, T, seed, arguments, compiled_families):
    expected = DeltaExpected(arguments(family, T=T, H=1, HV=1, seed=seed))
    check_all(expected, flaop.chunk_gated_delta_rule, "cuda")


@pytest.mark.parametrize("T", [20, 64, 65, 130])
def test_dispatcher(delta_device, T, arguments):
    """Both sides of the threshold."""
    expected = DeltaExpected(arguments("delta main", T=T))
    check_all(expected, flaop.gated_delta_rule, delta_device)


# The delta rule takes the same arguments but for those of the gate.
GATE_ARGUMENTS = ("g", "A_log", "dt_bias", "use_gate_in_kernel")


@pytest.mark.parametrize("T", [20, 130])
@pytest.mark.parametrize("name", ["delta_rule", "chunk_delta_rule", "fused_recurrent_delta_rule"])
def test_delta_rule(delta_device, name, T, arguments):
    expected = DeltaExpected(arguments("delta without gate", T=T, B=2, lengths=None))

    def call(**inputs):
        inputs = {n: x for n, x in inputs.items() if n not in GATE_ARGUMENTS}
        return getattr(flaop, name)(**inputs)

    check_all(expected, call, delta_device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["delta main", "delta packed", "delta without gate"])
def test_each_gradient_asked_for_alone(delta_device, family, kind, arguments):
    check_alone(DeltaExpected(arguments(family)), op(kind), delta_device)


@pytest.mark.parametrize(
    "hints", [{"split_size": 64}, {"disable_recompute": True}, {"chunk_size": 16}], ids=str
)
@pytest.mark.parametrize("family", ["delta main", "delta packed"])
def test_hints_change_no_value(delta_device, family, hints, arguments):
    expected = DeltaExpected(arguments(family))
    fn = functools.partial(flaop.chunk_gated_delta_rule, **hints)
    check_all(expected, fn, delta_device)


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_gates_empty_the_state(delta_device, kind, arguments):
    inputs = arguments("delta given gate", T=200, gates="slow")
    inputs["g"][:, 70] = -torch.inf
    inputs["g"][:, 100:, 1:] = -torch.inf
    inputs["g"][:, 130:, :1] = -1000
    check_all(DeltaExpected(inputs), op(kind), delta_device)
