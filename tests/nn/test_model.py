"""The hybrid model: pieces, compilation in every mode, checkpointing, configuration."""

import collections
import contextlib
import dataclasses
import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from flaop.nn import LAYERS, HybridConfig, HybridModel, RMSNorm, ShortConvolution
from flaop.testing import relative_error
from flaop.testing.compilation import Compiled

CONFIG = HybridConfig(
    vocab_size=32, hidden_size=32, num_layers=2, layers=("kda", "attention"), num_heads=2,
    head_dim=16,
)  # fmt: skip

MODES = {
    "train": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": None,
}


def tokens(device, batch_size=2, length=80):
    return torch.randint(32, (batch_size, length), device=device)


def mode_context(mode, device):
    return torch.autocast(device, torch.bfloat16) if mode == "autocast" else MODES[mode]()


def test_pieces_equal_one_call(device):
    model = HybridModel(dataclasses.replace(CONFIG, num_layers=3)).to(device)
    x = tokens(device)
    with torch.no_grad():
        whole, _ = model(x)
        states, outputs = None, []
        for piece in x.split([66, 3, 1, 10], dim=1):
            y, states = model(piece, states, output_states=True)
            outputs.append(y)
        assert relative_error(torch.cat(outputs, dim=1), whole) < 1e-4
        cache = model.make_cache(2, max_length=80)
        outputs = [model.extend(piece, cache) for piece in x.split([70] + [1] * 10, dim=1)]
        assert relative_error(torch.cat(outputs, dim=1), whole) < 1e-4


def test_packed_equals_each_sequence_alone(device):
    model = HybridModel(CONFIG).to(device)
    x = tokens(device, 1, 90)
    with torch.no_grad():
        y, _ = model(x, cu_seqlens=torch.tensor([0, 70, 71, 90], device=device))
        for b, e in ((0, 70), (70, 71), (71, 90)):
            assert relative_error(y[:, b:e], model(x[:, b:e])[0]) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_in_every_mode(device, mode):
    model = HybridModel(dataclasses.replace(CONFIG, layers=("kda",))).to(device)
    compiled = Compiled(model, dynamic=True)
    x, other_shape = tokens(device, 2, 80), tokens(device, 3, 100)
    with mode_context(mode, device):
        compiled.call(other_shape)
        got, want = compiled.call(x)[0], model(x)[0]
    assert got.dtype == want.dtype
    assert relative_error(got.float(), want.float()) < (2e-2 if mode == "autocast" else 1e-4)
    if mode in ("no_grad", "inference_mode"):
        assert compiled.graphs == [["chunk_kda"] * 2]
        return
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(got.float().square().sum(), parameters)
    expected = torch.autograd.grad(want.float().square().sum(), parameters)
    assert compiled.graphs == [["chunk_kda_fwd"] * 2, ["chunk_kda_bwd"] * 2]
    for (name, _), a, b in zip(model.named_parameters(), gradients, expected, strict=True):
        assert relative_error(a, b) < (6e-2 if mode == "autocast" else 5e-4), name


def test_inductor(device):
    model = HybridModel(CONFIG).to(device)
    x = tokens(device)

    def loss(model):
        return F.cross_entropy(model(x)[0].flatten(0, 1), x.flatten())

    got, want = torch.compile(loss, fullgraph=True)(model), loss(model)
    assert relative_error(got, want) < 1e-4
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(got, parameters)
    expected = torch.autograd.grad(want, parameters)
    for (name, _), a, b in zip(model.named_parameters(), gradients, expected, strict=True):
        assert relative_error(a, b) < 5e-4, name


def test_decode_step_compiles_once(device):
    model = HybridModel(CONFIG).to(device)
    step = Compiled(model.extend, dynamic=None)
    x = tokens(device)
    cache = model.make_cache(2, max_length=80)
    outputs = [model.extend(x[:, :70], cache)]
    outputs += [step.call(x[:, t : t + 1], cache) for t in range(70, 80)]
    with torch.no_grad():
        assert relative_error(torch.cat(outputs, dim=1), model(x)[0]) < 1e-4
    assert step.graphs == [["kda_step_"]]


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpoint(device, saved):
    model = HybridModel(dataclasses.replace(CONFIG, layers=("kda",), num_layers=1)).to(device)
    x = torch.randn(1, 70, 32, device=device, requires_grad=True)
    listed = torch.ops.flaop.chunk_kda_fwd.default

    def policy(ctx, op, *args, **kwargs):
        keep = saved and op == listed
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    with _Count() as count:
        y, _ = torch.utils.checkpoint.checkpoint(
            model.blocks[0],
            x,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
        )
        (got,) = torch.autograd.grad(y.square().sum(), x)
    assert count.calls["flaop.chunk_kda_fwd"] == (1 if saved else 2)
    assert count.calls["flaop.chunk_kda_bwd"] == 1
    (want,) = torch.autograd.grad(model.blocks[0](x)[0].square().sum(), x)
    assert relative_error(got, want) < 1e-4


class _Convolution(ShortConvolution):
    """A layer of another kind, to be chosen by name."""

    @classmethod
    def from_config(cls, config, layer_idx):
        return cls(config.hidden_size)


def test_layers_are_chosen_by_name(monkeypatch):
    monkeypatch.setitem(LAYERS, "convolution", _Convolution)
    config = dataclasses.replace(CONFIG, layers=("convolution", "kda", "kda"), num_layers=5)
    kinds = [type(b.mixer).__name__ for b in HybridModel(config).blocks]
    assert kinds == ["_Convolution", *["KimiDeltaAttention"] * 2, "_Convolution"] + [
        "KimiDeltaAttention"
    ]
    with pytest.raises(ValueError, match=r"layers must be names of .*, got \['gdn2'\]"):
        HybridConfig(layers=("gdn2",))
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        HybridConfig(num_layers=0)


def test_initial_output_is_moderate(device):
    model = HybridModel(HybridConfig(hidden_size=64, num_layers=8, head_dim=16)).to(device)
    x = torch.randint(256, (2, 50), device=device)
    with torch.no_grad():
        loss = F.cross_entropy(model(x)[0].flatten(0, 1), torch.randint_like(x, 256).flatten())
    assert 5.0 < loss.item() < 7.0  # log 256 = 5.55
    assert sum(isinstance(m, RMSNorm) for m in model.modules()) == 8 * 2 + 6 + 1
