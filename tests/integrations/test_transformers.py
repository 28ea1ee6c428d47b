"""flaop in the models of Hugging Face transformers, against transformers' own torch functions."""

import copy
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flaop.integrations import transformers as integration
from flaop.integrations.transformers import use_flaop
from flaop.testing import relative_error
from flaop.testing.compilation import Compiled

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed: pip install "flaop[transformers]"'
)

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
ROOT = Path(__file__).parents[2]
VOCABULARY = 128
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 512, "initializer_range": 0.15, "rms_norm_eps": 1e-6},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# What the configurations of each kind have beside them.
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24},
}
KDA = {"linear_num_heads": 3, "linear_head_dim": 16}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
LATENT = {
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"num_key_value_heads": 4},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
MODELS = {
    "Qwen3Next": {**DELTA, **EXPERTS, "head_dim": 16, "decoder_sparse_step": 2},
    "Qwen3_5": {**DELTA, "head_dim": 16},
    "KimiLinear": {**KDA, **LATENT},
}
# Configuration and layer of every kind that can be replaced, with the folder they are in.
KINDS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet", DELTA),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet", DELTA),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpTextGatedDeltaNet", DELTA),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridGatedDeltaNet", DELTA),
    "lara_mini": ("LaraMiniConfig", "LaraMiniGatedDeltaNet", DELTA),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearDeltaAttention", KDA),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridDeltaAttention", KDA),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextLinearAttention", KDA),
}


def remember(module):
    """Decays of a few to some hundred tokens; those drawn at random forget within one."""
    with torch.no_grad():
        for name, x in module.named_parameters():
            if name.endswith("A_log"):
                x.copy_(torch.linspace(-3.0, 0.5, x.numel()).view_as(x))
            elif name.endswith("dt_bias"):
                x.fill_(-2.0)
    return module


def make(kind="Qwen3Next", layers=("linear_attention", "full_attention"), device="cpu"):
    names = (f"{kind}TextConfig", f"{kind}Config")
    config = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    sizes = {**SIZES, **MODELS[kind], "num_hidden_layers": len(layers), "layer_types": list(layers)}
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**sizes))
    return remember(model.eval()).to(device)


def pair(*args, **options):
    model = make(*args, **options)
    return model, use_flaop(copy.deepcopy(model))


def tokens(batch, length, device="cpu"):
    return torch.randint(3, VOCABULARY, (batch, length), device=device)


def gradients(model, x):
    output = model(x, labels=x, use_cache=False)
    output.loss.backward()
    return output.logits, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("length", [20, 150])
def test_logits_and_gradients(device, kind, length):
    ours, flaops = pair(kind, ("linear_attention",) * 3 + ("full_attention",), device)
    x = tokens(2, length, device)
    expected, reference = gradients(ours, x)
    got, computed = gradients(flaops, x)
    assert relative_error(got, expected) < (1e-5 if device == "cpu" else 1e-4)
    assert reference.keys() == computed.keys()
    for name, gradient in reference.items():
        if gradient is None:
            assert computed[name] is None, name
        else:
            assert relative_error(computed[name], gradient) < 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(kind):
    config_name, name, sizes = KINDS[kind]
    path = f"transformers.models.{kind}"
    try:
        configuration = importlib.import_module(f"{path}.configuration_{kind}")
        modeling = importlib.import_module(f"{path}.modeling_{kind}")
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(configuration, config_name)(hidden_size=64, **sizes)
    layer = getattr(modeling, name)(config, layer_idx=0)
    for x in layer.parameters():
        nn.init.normal_(x, std=0.15)
    flaops = use_flaop(copy.deepcopy(remember(layer)))
    x = torch.randn(2, 100, 64)
    mask = torch.ones(2, 100)
    mask[0, :40] = 0
    weight = torch.randn(2, 100, 64)
    results = []
    for module in (layer, flaops):
        output = module(x, attention_mask=mask)
        names, parameters = zip(*module.named_parameters())
        gradients = torch.autograd.grad(output, parameters, weight)
        results.append({"output": output, **dict(zip(names, gradients))})
    expected, got = results
    assert expected["output"].norm() > 1e-2
    for key, value in expected.items():
        assert relative_error(got[key], value) < 1e-4, key


def test_the_kinds_of_layer_are_those_that_the_documents_name():
    assert {name for _, name, _ in KINDS.values()} == set(integration.LAYERS)
    text = (ROOT / "docs" / "transformers.md").read_text()
    for name, model in integration.LAYERS.items():
        assert f"| {model} | `{name}` |" in text
    first, last = (f"{a}.{b}" for a, b in (integration.OLDEST, integration.NEWEST))
    assert f"transformers {first} to {last}" in text
    limits = f'"transformers>={first},<{integration.NEWEST[0]}.{integration.NEWEST[1] + 1}"'
    assert limits in (ROOT / "pyproject.toml").read_text()


def test_the_example_of_the_documents_runs():
    text = (ROOT / "docs" / "transformers.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    example, compiled = example.strip().rsplit("\n", 1)
    assert "torch.compile(model, fullgraph=True)" in compiled  # the tests below do that
    scope = {}
    exec(example, scope)
    assert scope["tokens"].shape[1] > 100


@torch.no_grad()
def test_bf16():
    ours, flaops = pair()
    x = tokens(2, 100)
    exact = ours(x).logits
    own = relative_error(ours.bfloat16()(x).logits, exact)
    got = flaops.bfloat16()(x).logits
    assert got.dtype == torch.bfloat16
    assert relative_error(got, exact) < 2 * own + 1e-2


@torch.no_grad()
def test_left_padding_leaves_no_trace():
    ours, flaops = pair()
    x = tokens(2, 90)
    mask = torch.ones_like(x)
    mask[0, :30] = 0
    x[0, :30] = 0
    expected = ours(x, attention_mask=mask).logits
    got = flaops(x, attention_mask=mask).logits
    assert relative_error(got[mask.bool()], expected[mask.bool()]) < 1e-5
    alone = flaops(x[:1, 30:]).logits
    assert relative_error(got[:1, 30:], alone) < 1e-5


@pytest.mark.parametrize(
    "kind, length, padding",
    [("Qwen3Next", 5, 0), ("Qwen3Next", 90, 0), ("Qwen3Next", 90, 30), ("Qwen3_5", 90, 30)]
    + [("KimiLinear", 5, 0), ("KimiLinear", 90, 30)],
)
def test_generate_chooses_the_same_tokens(kind, length, padding):
    ours, flaops = pair(kind, ("linear_attention",) * 2 + ("full_attention",))
    prompt = tokens(2, length)
    mask = torch.ones_like(prompt)
    prompt[0, :padding] = 0
    mask[0, :padding] = 0
    options = {
        **{"attention_mask": mask, "do_sample": False},
        **{"max_new_tokens": 64, "min_new_tokens": 64},
        **{"return_dict_in_generate": True, "output_logits": True},
    }
    expected = ours.generate(prompt, **options)
    got = flaops.generate(prompt, **options)
    assert got.sequences.shape == (2, length + 64)
    differ = (got.sequences != expected.sequences)[:, length:]
    for row in range(2):
        if differ[row].any():
            best = expected.logits[int(differ[row].int().argmax())][row].topk(2).values
            assert best[0] - best[1] < 1e-4
        else:
            for a, b in zip(got.logits, expected.logits):
                assert relative_error(a[row], b[row]) < 1e-4


@pytest.mark.parametrize(
    "kind, length, op",
    [("Qwen3Next", 20, "fused_recurrent_gated_delta_rule")]
    + [("Qwen3Next", 100, "chunk_gated_delta_rule"), ("Qwen3_5", 100, "chunk_gated_delta_rule")]
    + [("KimiLinear", 100, "chunk_kda")],
)
def test_compiles_in_one_graph_without_a_gradient(kind, length, op):
    model = use_flaop(make(kind))
    x = tokens(2, length)
    compiled = Compiled(model, dynamic=False)
    with torch.no_grad():
        got = compiled.call(x, use_cache=False).logits
        assert relative_error(got, model(x, use_cache=False).logits) < 1e-5
    assert compiled.compilations == 1
    assert compiled.graphs == [[op]]


def test_compiles_in_one_graph_with_gradients():
    # Before 5.23 the backward of the experts reads sizes from tensors, without a GPU.
    model = use_flaop(make("Qwen3Next" if VERSION >= (5, 23) else "Qwen3_5"))
    again = copy.deepcopy(model)
    x = tokens(2, 100)
    compiled = Compiled(model, dynamic=False)
    loss = compiled.call(x, labels=x, use_cache=False).loss
    loss.backward()
    assert compiled.compilations == 1
    assert compiled.graphs == [["chunk_gated_delta_rule_fwd"], ["chunk_gated_delta_rule_bwd"]]
    _, expected = gradients(again, x)
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[name]) < 1e-4, name


@pytest.mark.slow
def test_inductor():
    model = use_flaop(make(layers=("linear_attention", "full_attention")))
    again = copy.deepcopy(model)
    x = tokens(2, 100)
    compiled = torch.compile(model, fullgraph=True)
    compiled(x, labels=x, use_cache=False).loss.backward()
    _, expected = gradients(again, x)
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[name]) < 1e-4, name


@torch.no_grad()
def test_a_decode_step_compiles_in_one_graph():
    model = use_flaop(make())
    cache = transformers.StaticCache(config=model.config, max_cache_len=128)
    copied = transformers.StaticCache(config=model.config, max_cache_len=128)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    prompt = tokens(2, 100)
    for x in (cache, copied):
        model(prompt, **{name: x})
    compiled = Compiled(model, dynamic=False)
    for _ in range(3):
        token = tokens(2, 1)
        got = compiled.call(token, **{name: cache}).logits
        assert relative_error(got, model(token, **{name: copied}).logits) < 1e-5
    assert compiled.compilations == 1
    assert compiled.graphs == [["fused_recurrent_gated_delta_rule"]]


def uses_flaop(model):
    """The ops of flaop that a forward runs."""
    with torch.no_grad(), Calls() as calls:
        model(tokens(1, 100), use_cache=False)
    return calls.names


class Calls(TorchDispatchMode):
    def __enter__(self):
        self.names = set()
        return super().__enter__()

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        if function.namespace == "flaop":
            self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_only_this_model_changes_and_once():
    other = make()
    model = make()
    keys = list(model.state_dict())
    assert use_flaop(model) is model
    classes = [type(m) for m in model.modules()]
    assert use_flaop(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == keys
    model.load_state_dict(other.state_dict())
    assert uses_flaop(model) == {"flaop::chunk_gated_delta_rule"}
    assert uses_flaop(other) == uses_flaop(make()) == set()


@pytest.mark.parametrize("kind", ["Qwen3Next", "KimiLinear"])
def test_copies_and_pickles_keep_flaop(kind):
    model = use_flaop(make(kind))
    x = tokens(1, 100)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert uses_flaop(other) == uses_flaop(model) != set()
        for a, b in zip(model.parameters(), other.parameters()):
            assert a is not b
        with torch.no_grad():
            assert torch.equal(other(x).logits, model(x).logits)


def test_a_pickle_loads_where_flaop_was_not_asked_for(tmp_path):
    model = use_flaop(make())
    x = tokens(1, 100)
    torch.save((model, x, model(x).logits.detach()), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, x, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "assert 'flaop.integrations.transformers' in sys.modules\n"
        "assert torch.equal(model(x).logits, expected)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_gradient_checkpointing():
    model = use_flaop(make()).train()
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable({"use_reentrant": False})
    x = tokens(2, 100)
    _, expected = gradients(model, x)
    _, got = gradients(again, x)
    for name, value in expected.items():
        assert relative_error(got[name], value) < 1e-5, name


@pytest.mark.parametrize("run", [integration.run_gated_delta_rule, integration.run_kda])
def test_packed_sequences(run):
    name = "cu_seqlens" if run is integration.run_gated_delta_rule else "cu_seq_lens_q"
    q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
    g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
    if run is integration.run_kda:
        g = g[..., None].expand(-1, -1, -1, 16)
    inputs = (q, k, v, g, beta)
    ends = torch.tensor([0, 30, 100])
    with pytest.raises(ValueError, match="seq_idx"):
        run(*inputs, **{name: ends})
    seq_idx = torch.repeat_interleave(torch.arange(2), ends.diff())[None]
    got, _ = run(*inputs, **{name: ends}, seq_idx=seq_idx, use_qk_l2norm_in_kernel=True)
    for piece in (slice(0, 30), slice(30, 100)):
        alone, state = run(*(x[:, piece] for x in inputs), use_qk_l2norm_in_kernel=True)
        assert state is None
        assert relative_error(got[:, piece], alone) < 1e-5


def test_behind_the_hooks_of_accelerate():
    """They keep the forward that they wrap as `_old_forward` of the module."""
    model = make()
    layer = model.model.layers[0].linear_attn
    calls = []

    def hooked(self, *args, **kwargs):
        calls.append(self)
        return self._old_forward(*args, **kwargs)

    layer._old_forward = layer.forward
    layer.forward = types.MethodType(hooked, layer)
    assert uses_flaop(use_flaop(model)) == {"flaop::chunk_gated_delta_rule"}
    assert calls == [layer]


@pytest.mark.skipif(VERSION < (5, 15), reason="the functions are attributes of the layer")
def test_a_forward_that_cannot_be_changed_is_refused():
    model = make(layers=("linear_attention",) * 2)
    layer = model.model.layers[1].linear_attn
    layer.forward = types.MethodType(lambda self, x, **_: x, layer)
    with pytest.raises(ValueError, match="forward of its own"):
        use_flaop(model)

    class Mine(type(layer)):
        def forward(self, hidden_states, **_):
            return hidden_states

    del layer.forward
    layer.__class__ = Mine
    with pytest.raises(ValueError, match="the forward of Mine"):
        use_flaop(model)
    assert uses_flaop(model) == set()


def test_bad_models():
    with pytest.raises(ValueError, match="no layer that flaop can.*Qwen3-Next.*Kimi-Linear"):
        use_flaop(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got str"):
        use_flaop("Qwen/Qwen3-Next-80B-A3B-Instruct")


@pytest.mark.parametrize("version", ["4.57.6", "5.4.0", "5.999.0", "6.0.0.dev0"])
def test_unknown_versions(monkeypatch, version):
    model = make()
    # Making a model may put another object in the place of the imported one.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(RuntimeError, match=rf"5\.5 to 5\.\d+, and {version} is installed"):
        use_flaop(model)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "flaop\[transformers\]"'):
        use_flaop(nn.Linear(2, 2))


def test_importing_flaop_does_not_import_transformers():
    code = (
        "import sys, flaop, flaop.integrations.transformers\n"
        "assert 'transformers' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
