"""Checks of layers and of a model on shards that every rank runs: functions for testing.ranks."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flaop.distributed import resolve, shard
from flaop.nn import (
    Attention,
    GatedDeltaNet,
    GatedLinearAttention,
    HybridConfig,
    HybridModel,
    KimiDeltaAttention,
    Mamba2Mixer,
    MultiScaleRetention,
    ShortConvolution,
)
from flaop.testing.context_parallel import first_ranks, sum_over
from flaop.testing.tolerances import relative_error

# By name, so that processes make their own.
LAYERS = {
    "kda": lambda: KimiDeltaAttention(32, 2, 16),
    "kda bounded": lambda: KimiDeltaAttention(32, 1, 16, num_v_heads=2, gate="bounded"),
    "gdn": lambda: GatedDeltaNet(32, 1, 16, num_v_heads=2),
    "gdn without convolutions": lambda: GatedDeltaNet(32, 2, 16, conv_size=0, state_v_first=True),
    "gla": lambda: GatedLinearAttention(32, 2, 16, conv_size=2),
    "retention": lambda: MultiScaleRetention(32, 2, 16),
    "mamba2": lambda: Mamba2Mixer(32, num_heads=2, head_dim=16, state_size=16),
    "convolution": lambda: ShortConvolution(32, 4, bias=True),
    "attention": lambda: Attention(32, 2, 16),
}


def check_layer(
    name: str, size: int, lengths: list[int] | None, with_state: bool, compiled: str = ""
) -> None:
    """A layer on shards against the same layer in one process: y, states, every gradient."""
    group = first_ranks(size)
    if group is None:
        return
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    B, T = (2 if lengths is None else 1), 48
    N = B if lengths is None else len(lengths)
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    x, dy = torch.randn(2, B, T, 32, dtype=torch.float64).unbind(0)
    state = None
    if with_state:
        if name == "convolution":
            state = (torch.randn(N, 3, 32, dtype=torch.float64),)
        else:
            zeros = layer.initial_state(N)
            state = type(zeros)(*(torch.randn(y.shape, dtype=y.dtype) for y in zeros))

    def run(x, dy, group):
        leaf = x.clone().requires_grad_()
        given = state and [y.clone().requires_grad_() for y in state]
        if name == "convolution":
            call = functools.partial(layer, group=group)
            given = given and given[0]
        else:
            layer.set_context_parallel(group)
            call, given = layer, given and type(state)(*given)
        if compiled and group is not None:
            torch._dynamo.reset()
            call = torch.compile(call, fullgraph=True, backend=compiled)
        y, final = call(leaf, given, cu_seqlens, with_state)
        final = [] if final is None else [final] if isinstance(final, Tensor) else list(final)
        given = [] if given is None else [given] if isinstance(given, Tensor) else list(given)
        # without convolutions their states have no elements
        final, given = ([z for z in zs if z.numel()] for zs in (final, given))
        summed = [*given, *layer.parameters()]
        generator = torch.Generator().manual_seed(2)
        d_final = [torch.randn(z.shape, generator=generator, dtype=z.dtype) for z in final]
        gradients = torch.autograd.grad([y, *final], [leaf, *summed], [dy, *d_final])
        return [y, gradients[0]], [*final, *gradients[1:]]

    expected = run(x, dy, None)
    found = run(shard(x, group), shard(dy, group), group)
    for i, (got, ref) in enumerate(zip(found[0], expected[0], strict=True)):
        assert relative_error(got, shard(ref, group)) < 1e-10, (name, i)
    for i, (got, ref) in enumerate(zip(found[1], expected[1], strict=True)):
        assert relative_error(sum_over(got, group), ref) < 1e-10, (name, "summed", i)


def train_hybrid(steps: int = 3, mesh_shape: tuple[int, int] | None = (2, 2)) -> list:
    """Losses and parameters of a hybrid model after some steps.

    Args:
        mesh_shape: ranks of context parallelism, and of data parallelism by FSDP2; None: one
            process, which has all.
    """
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=32, hidden_size=32, num_heads=2, head_dim=16, num_layers=4,
        layers=("kda", "gdn", "attention"),
    )  # fmt: skip
    model = HybridModel(config)
    batches = torch.randint(32, (steps, 2, 49))
    group = None
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("cp", "dp"))
        group = resolve(mesh["cp"])
        model.set_context_parallel(group)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)  # replicated over cp, sharded over dp
        fully_shard(model, mesh=mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for batch in batches:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        if group is not None:
            data = resolve(mesh["dp"])
            tokens, targets = (shard(shard(x, group), data, dim=0) for x in (tokens, targets))
        logits, _ = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        if group is not None:
            loss = sum_over(loss, resolve(dist.group.WORLD)) / dist.get_world_size()
        losses.append(loss.item())
    parameters = [p.full_tensor() if group is not None else p for p in model.parameters()]
    return [losses, [p.detach() for p in parameters]]


def check_hybrid(mesh_shape: tuple[int, int]) -> None:
    """Training on shards gives what training in one process gives."""
    expected, found = train_hybrid(mesh_shape=None), train_hybrid(mesh_shape=mesh_shape)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for got, ref in zip(found[1], expected[1], strict=True):
        # a step is of the size of the rate, however small a gradient is
        torch.testing.assert_close(got, ref, rtol=1e-4, atol=1e-5)
