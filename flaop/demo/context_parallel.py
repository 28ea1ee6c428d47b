"""Trains the demo's model on several ranks, its sequences cut into shards.

    torchrun --nproc-per-node 4 -m flaop.demo.context_parallel --cp 2

Parameters are sharded over the ranks that hold other sequences (FSDP2) and replicated over those
that hold other shards of the same ones.
"""

import argparse
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from flaop.demo import corpus
from flaop.demo.runtime import DemoError
from flaop.demo.text import SIZES
from flaop.demo.training import Schedule, autocast, optimizer
from flaop.distributed import resolve, shard
from flaop.nn import HybridConfig, HybridModel

_LOG_EVERY = 10  # steps
_DURATION = 1e9  # seconds: the steps end the schedule


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun -m flaop.demo.context_parallel", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--cp", type=int, help="ranks that share a sequence (default: all)")
    parser.add_argument("--size", choices=SIZES, help="default: small on cpu, base on cuda")
    parser.add_argument("--length", type=int, help="tokens of a sequence, over all its ranks")
    parser.add_argument("--batch", type=int, help="sequences of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", nargs="+", default=["kda", "kda", "gdn", "attention"])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(args: argparse.Namespace) -> float:
    """Trains on every rank that torchrun started; the last loss in bits per byte."""
    on_cuda = (args.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    try:
        return train(args, on_cuda)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, on_cuda: bool) -> float:
    """The same where torch.distributed is initialised already."""
    ranks = dist.get_world_size()
    cp = args.cp or ranks
    if cp < 1 or ranks % cp:
        raise DemoError(f"--cp must divide the number of ranks, {ranks}, got {cp}", 2)
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    size = args.size or ("base" if on_cuda else "small")
    hidden_size, num_heads, head_dim, num_layers, length, batch, rate = SIZES[size]
    length, batch = args.length or length, args.batch or max(batch, ranks // cp)
    if length % cp or batch % (ranks // cp):
        raise DemoError(
            f"--length {length} must be a multiple of --cp {cp}, and --batch {batch} of the other "
            f"{ranks // cp} ranks",
            2,
        )
    mesh = init_device_mesh(device.type, (cp, ranks // cp), mesh_dim_names=("cp", "dp"))
    group, data = resolve(mesh["cp"]), resolve(mesh["dp"])
    torch.manual_seed(args.seed)  # the same parameters and batches on every rank
    config = HybridConfig(
        hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, num_layers=num_layers,
        layers=tuple(args.layers),
    )  # fmt: skip
    with torch.device(device):
        model = HybridModel(config, context_parallel=group)
    for block in model.blocks:
        if args.compile:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adamw = optimizer(model, rate)
    schedule = Schedule(args.steps, _DURATION, rate)
    text = corpus.load().train
    dtype = torch.bfloat16 if on_cuda else torch.float32
    start, shown = time.monotonic(), math.nan
    for step in range(args.steps):
        for parameters in adamw.param_groups:
            parameters["lr"] = schedule.rate(step, 0.0)
        starts = torch.randint(text.numel() - length - 1, (batch, 1))
        tokens = shard(text[starts + torch.arange(length + 1)], data, dim=0).long()
        inputs, targets = (
            shard(x, group).to(device) for x in (tokens[:, :-1], tokens[:, 1:])
        )
        with autocast(device, dtype):
            logits, _ = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        if step % _LOG_EVERY == 0 or step + 1 == args.steps:
            # a mean over shards of one length is the mean over all tokens
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            shown = mean.item() / ranks / math.log(2)
            if dist.get_rank() == 0:
                speed = (step + 1) * batch * length / (time.monotonic() - start)
                print(f"step {step + 1}: {shown:.3f} bits per byte, {speed:,.0f} tokens/s")
    return shown


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        print(
            "flaop.demo.context_parallel: start it by torchrun --nproc-per-node N -m "
            "flaop.demo.context_parallel",
            file=sys.stderr,
        )
        return 2
    try:
        run(args)
    except DemoError as error:
        print(f"flaop.demo.context_parallel: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
