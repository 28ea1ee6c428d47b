"""Which path a call takes: the tensor-free choice, the dispatcher, explain, supports, backend."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flaop
from flaop import _paths
from flaop._extension import bindings
from flaop.testing import kda_inputs

TENSORS = ("q", "k", "v", "g", "beta")


class Recorder(TorchDispatchMode):
    """Names of the flaop ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        # In inference mode a composite arrives whole.
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
            with self:
                return op.decompose(*args, **(kwargs or {}))
        if op.namespace == "flaop":
            self.names.append(op._schema.name.removeprefix("flaop::"))
        return op(*args, **(kwargs or {}))


def taken(**inputs):
    with Recorder() as recorder:
        flaop.kda(**inputs)
    return recorder.names


def small(**kwargs):
    return kda_inputs(**{"H": 1, "K": 16, "V": 24, **kwargs})


BUILT = bindings.FLASH_KDA_BUILT


# The tensor-free choice


@pytest.mark.parametrize(
    "backend, needs, path",
    [
        ("auto", ["kernel", "short"], "fused_recurrent"),
        ("auto", ["kernel", "long"], "flash_kda" if BUILT else "chunk"),
        ("auto:fused_recurrent,chunk", ["kernel", "long"], "chunk"),
        ("auto", ["kernel", "short", "gradient"], "chunk"),
        ("auto", ["kernel", "long", "gradient"], "chunk"),
        ("auto:chunk", ["kernel", "short"], "chunk"),
        ("auto:fused_recurrent", ["kernel", "short"], "fused_recurrent"),
        ("auto:fused_recurrent", ["kernel", "long"], ""),
        ("auto:chunk,fused_recurrent@0.1", ["kernel", "short"], "fused_recurrent"),
        ("auto@0.1", ["kernel", "short"], "fused_recurrent"),
        ("chunk", ["kernel", "short"], "chunk"),
        ("chunk@0.1", ["kernel", "short"], "chunk"),
        ("fused_recurrent", ["kernel", "long", "gradient"], "fused_recurrent"),
        ("flash_kda", ["kernel", "long"], "flash_kda" if BUILT else ""),
        ("flash_kda", ["kernel", "short"], "flash_kda" if BUILT else ""),
        ("auto", ["kernel", "long", "grouped_heads"], "chunk"),
    ],
)
def test_choice(backend, needs, path):
    assert bindings.decide(backend, needs)[0] == path


@pytest.mark.parametrize(
    "backend",
    ["", "Chunk", "auto:", "auto:chunk,", "auto:auto", "chunk,fused_recurrent", "autochunk"],
)
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match="backend must be"):
        bindings.decide(backend, ["kernel"])
    with pytest.raises(ValueError, match="backend must be"):
        flaop.kda(**small(T=5), backend=backend)


def test_flash_kda_declines_each_feature_it_lacks():
    lacking = set(bindings.features()) - {"long", "short", "neg_eigval"}
    lacking -= {"kernel"} if BUILT else set()
    for feature in lacking:
        path, sentences = bindings.decide("flash_kda", [feature])
        assert path == ""
        assert sentences[0].startswith("flash_kda: ")
        # One clause a feature.
        assert "; " not in sentences[0]
    _, sentences = bindings.decide("flash_kda", sorted(lacking))
    assert sentences[0].count("; ") == len(lacking) - 1


def test_python_knows_the_paths():
    assert _paths.PATHS == ("flash_kda", "fused_recurrent", "chunk")
    allowed = ("flash_kda," if BUILT else "") + "fused_recurrent,chunk"
    assert flaop._paths.BACKEND == f"auto:{allowed}@{flaop.__version__}"


# The dispatcher


@pytest.mark.parametrize(
    "inputs, path",
    [
        ({"T": 64}, "fused_recurrent_kda"),
        ({"T": 65}, "chunk_kda"),
        ({"T": 1}, "fused_recurrent_kda"),
        ({"B": 3, "T": 65}, "chunk_kda"),
        ({"lengths": [64]}, "fused_recurrent_kda"),
        ({"lengths": [65]}, "chunk_kda"),
        ({"lengths": [100, 28]}, "fused_recurrent_kda"),
        ({"lengths": [100, 29]}, "chunk_kda"),
        ({"lengths": [64] * 16}, "fused_recurrent_kda"),
        ({"lengths": [64] * 16 + [1]}, "chunk_kda"),
    ],
)
def test_threshold(inputs, path):
    inputs = small(**inputs)
    assert taken(**inputs) == [path]
    T, N = inputs["q"].shape[1], 1
    if inputs.get("cu_seqlens") is not None:
        N = inputs["cu_seqlens"].numel() - 1
    packed_limit = min(bindings.SHORT_TOKENS * N, bindings.SHORT_PACKED_TOKENS)
    assert (path != "chunk_kda") == (T <= max(bindings.SHORT_TOKENS, packed_limit))


@pytest.mark.parametrize("T", [10, 100])
@pytest.mark.parametrize("name", ["q", "g", "A_log", "dt_bias", "initial_state"])
def test_any_gradient_leads_to_chunks_with_residuals(T, name):
    inputs = small(T=T, gate_in_kernel="softplus", initial_state=True)
    inputs[name].requires_grad_()
    assert taken(**inputs) == ["chunk_kda_fwd"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert taken(**inputs) == ["fused_recurrent_kda" if T <= 64 else "chunk_kda"]


def test_a_forced_path_serves_gradients_and_any_length():
    inputs = small(T=70, requires_grad=True)
    assert taken(**inputs, backend="fused_recurrent") == ["fused_recurrent_kda_fwd"]
    with flaop.backend("fused_recurrent"):
        assert taken(**inputs) == ["fused_recurrent_kda_fwd"]
    with flaop.backend("chunk"), torch.no_grad():
        assert taken(**small(T=5)) == ["chunk_kda"]
        # The argument wins over the setting.
        assert taken(**small(T=5), backend="fused_recurrent") == ["fused_recurrent_kda"]
        with flaop.backend("auto"):
            assert taken(**small(T=5)) == ["fused_recurrent_kda"]
    assert taken(**small(T=5)) == ["fused_recurrent_kda"]


def test_backend_is_restored_after_an_error():
    before = _paths.BACKEND
    with pytest.raises(KeyError), flaop.backend("chunk"):
        raise KeyError
    assert _paths.BACKEND == before
    with pytest.raises(ValueError, match="path must be one of"), flaop.backend("recurrent"):
        pass


def test_a_path_that_cannot_serve_raises():
    lacks = "the device is not a CUDA device" if BUILT else "kernel not built"
    for inputs in ({"backend": "flash_kda"}, {"backend": "auto:flash_kda"}):
        with pytest.raises(ValueError, match=lacks):
            flaop.kda(**small(T=70), **inputs)
    with flaop.backend("flash_kda"), pytest.raises(ValueError, match="flash_kda cannot serve"):
        flaop.kda(**small(T=70))
    inputs = {name: small(T=70)[name] for name in TENSORS}
    with pytest.raises(NotImplementedError, match=lacks):
        flaop.flash_kda_fwd(**inputs)


# explain and supports


def test_explain_agrees_with_what_runs():
    for T in (10, 64, 65):
        for grad in (False, True):
            inputs = small(T=T, requires_grad=grad)
            path = flaop.explain(flaop.kda, **inputs).path
            assert taken(**inputs)[0].removesuffix("_fwd") == f"{path}_kda"


def test_explain_gives_a_sentence_for_each_path_passed_over():
    path, passed_over = flaop.explain(flaop.kda, **small(T=100, requires_grad=True))
    assert path == "chunk"
    assert [sentence.split(":")[0] for sentence in passed_over] == ["flash_kda", "fused_recurrent"]
    assert "more than 64 tokens" in passed_over[1]
    assert "a gradient is needed" in passed_over[1]
    with flaop.backend("chunk"):
        assert "another path is forced" in flaop.explain(flaop.kda, **small(T=5)).passed_over[1]


OTHER_DEVICE = "the device is not a CUDA device of compute capability 9.0"


def flash_lacks(**inputs):
    """Clauses of what the fused kernel lacks for a call."""
    for sentence in flaop.explain(flaop.kda, **inputs).passed_over:
        if sentence.startswith("flash_kda: "):
            return set(sentence.removeprefix("flash_kda: ").split("; "))
    return set()


def flash_inputs(**changes):
    """A call on a fake CUDA device that has everything the fused kernel asks for but the device."""
    sizes = {
        "H": 2,
        "HV": 2,
        "K": 128,
        "V": 128,
        "dtype": torch.bfloat16,
        **changes.pop("sizes", {}),
    }
    H, HV, K, V, dtype = sizes.values()
    q, k = (torch.empty(1, 100, H, K, dtype=dtype, device="cuda") for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": torch.empty(1, 100, HV, V, dtype=dtype, device="cuda"),
        "g": torch.empty(1, 100, HV, K, dtype=changes.pop("g", dtype), device="cuda"),
        "beta": torch.empty(1, 100, HV, dtype=dtype, device="cuda"),
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": -5.0,
        **changes,
    }


@pytest.mark.parametrize(
    "changes, clause",
    [
        ({"sizes": {"K": 64}}, "K = V = 128"),
        ({"sizes": {"V": 64}}, "K = V = 128"),
        ({"sizes": {"HV": 4}}, "HV is not H"),
        ({"sizes": {"dtype": torch.float16}}, "not bfloat16"),
        ({"g": torch.float32}, "not bfloat16"),
        ({"use_gate_in_kernel": False}, "use_gate_in_kernel is False"),
        ({"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel is False"),
        ({"use_beta_sigmoid_in_kernel": False}, "use_beta_sigmoid_in_kernel is False"),
        ({"safe_gate": False}, "no safe_gate with lower_bound in [-5, 0)"),
        ({"lower_bound": None}, "no safe_gate with lower_bound in [-5, 0)"),
        ({"lower_bound": -6.0}, "no safe_gate with lower_bound in [-5, 0)"),
        ({"output_final_state": True}, "state_v_first is False"),
    ],
)
def test_flash_kda_predicate(changes, clause):
    with FakeTensorMode():
        ideal = flash_lacks(**flash_inputs())
        changed = flash_lacks(**flash_inputs(**changes))
    assert ideal <= {"kernel not built", OTHER_DEVICE}
    (added,) = changed - ideal
    assert clause in added


def test_flash_kda_takes_negative_eigenvalues():
    with FakeTensorMode():
        lacks = flash_lacks(**flash_inputs(allow_neg_eigval=True))
    assert lacks <= {"kernel not built", OTHER_DEVICE}


def test_supports():
    inputs = small(T=100, requires_grad=True)
    assert flaop.supports("chunk", flaop.kda, **inputs)
    assert flaop.supports("fused_recurrent", flaop.kda, **inputs)
    assert not flaop.supports("flash_kda", flaop.kda, **inputs)
    with pytest.raises(ValueError, match="path must be one of"):
        flaop.supports("fast", flaop.kda, **inputs)


def test_explain_takes_dispatchers_and_their_arguments_only():
    inputs = small(T=5)
    with pytest.raises(TypeError, match="take a dispatcher"):
        flaop.explain(flaop.chunk_kda, **inputs)
    with pytest.raises(TypeError, match="gate"):
        flaop.explain(flaop.kda, **inputs, gate=None)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        flaop.explain(flaop.kda, **{**inputs, "q": inputs["q"][0]})


def test_warmup_leaves_the_arguments_alone():
    inputs = small(T=70, requires_grad=True, initial_state=True)
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    with Recorder() as recorder:
        flaop.warmup(flaop.kda, **inputs)
    assert recorder.names == ["chunk_kda_fwd", "chunk_kda_bwd"]
    for name, x in before.items():
        assert torch.equal(inputs[name], x)
        assert inputs[name].grad is None


# Compiled


def compiled(fn, seen):
    """fullgraph, with the flaop ops of each compiled graph appended to `seen`."""
    from functorch.compile import aot_module_simplified

    def record(graph, _):
        seen.append(
            [
                node.target._schema.name.removeprefix("flaop::")
                for node in graph.graph.nodes
                if getattr(node.target, "namespace", "") == "flaop"
            ]
        )
        return graph.forward

    def backend(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=record, bw_compiler=record)

    return torch.compile(fn, fullgraph=True, dynamic=True, backend=backend)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_change_of_backend_after_compilation_takes_effect():
    seen = []
    fn = compiled(lambda *args: flaop.kda(*args)[0], seen)
    inputs = [small(T=12)[name] for name in TENSORS]
    fn(*inputs)
    with flaop.backend("chunk"):
        fn(*inputs)
    fn(*inputs)
    assert seen == [["fused_recurrent_kda"], ["chunk_kda"]]


def test_packed_lengths_compile_once_a_side():
    seen = []
    fn = compiled(lambda *args: flaop.kda(*args[:5], cu_seqlens=args[5])[0], seen)
    for lengths in ([3, 6], [10, 20, 9], [40, 50, 1], [200, 3], [70, 200, 4], [1, 2, 3, 5]):
        inputs = small(H=2, lengths=lengths)
        arguments = [inputs[name] for name in (*TENSORS, "cu_seqlens")]
        torch.testing.assert_close(fn(*arguments), flaop.kda(**inputs)[0])
    assert seen == [["fused_recurrent_kda"], ["chunk_kda"]]
