"""`python -m flaop demo recall`: two KDA layers learn to look values up by their keys."""

import argparse
import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flaop.demo.runtime import (
    DemoError,
    GraphRecorder,
    check_compiler,
    one_sentence_errors,
    resolve_device,
)
from flaop.demo.training import Schedule, train
from flaop.nn import HybridConfig, HybridModel, KimiDeltaAttention

_CHECK_EVERY = 20  # steps
_CHECK_SEQUENCES = 128
_FIRST_DISTINCT = 4  # pairs per sequence that differ at the start of training
_RAISE = 0.9  # accuracy at which the number of different pairs doubles
_GOAL = 0.99  # accuracy at which training ends early


@dataclasses.dataclass(frozen=True)
class Task:
    """Sequences k1 v1 k2 v2 ... of distinct keys with random values, then keys as queries."""

    pairs: int
    length: int
    keys: int  # number of different keys, and of different values

    def __post_init__(self):
        if not 0 < self.pairs <= self.keys:
            raise DemoError(f"{self.pairs} pairs need as many different keys, not {self.keys}", 2)
        if self.length <= 2 * self.pairs:
            raise DemoError(
                f"{self.pairs} pairs and a query need more than {2 * self.pairs} tokens, "
                f"got {self.length}",
                2,
            )

    def sample(
        self, batch_size: int, generator: torch.Generator, distinct: int | None = None
    ) -> Tensor:
        """[batch_size, length + queries]: the tokens, then the value each query asks for.

        With `distinct` below `pairs` the first pairs are repeated, so that shapes stay the same.
        """
        slots = torch.arange(self.pairs) % (distinct or self.pairs)
        order = torch.rand(batch_size, self.keys, generator=generator).argsort(1)
        keys = order[:, slots]
        values = torch.randint(self.keys, (batch_size, self.pairs), generator=generator)
        values = self.keys + values[:, slots]
        asked = torch.randint(self.pairs, (batch_size, self.queries), generator=generator)
        pairs = torch.stack([keys, values], dim=2).flatten(1)
        return torch.cat([pairs, keys.gather(1, asked), values.gather(1, asked)], dim=1)

    @property
    def queries(self) -> int:
        return self.length - 2 * self.pairs

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, length] and targets [B, queries]."""
        return batch[:, : self.length], batch[:, self.length :]


def model_config(task: Task, size: int) -> HybridConfig:
    """Two KDA layers; decay starts slow, because pairs are needed to the end of the sequence."""
    return HybridConfig(
        vocab_size=2 * task.keys,
        hidden_size=size,
        num_layers=2,
        layers=("kda",),
        num_heads=2,
        head_dim=size // 2,
        intermediate_size=2 * size,
        dt_range=(1e-5, 1e-3),
    )


def recall_loss(model: HybridModel, task: Task, batch: Tensor) -> Tensor:
    """Cross-entropy at the queries."""
    tokens, targets = task.split(batch)
    logits, _ = model(tokens)
    return F.cross_entropy(logits[:, -task.queries :].flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def accuracy(model: HybridModel, task: Task, batch: Tensor) -> float:
    """Share of queries whose likeliest token is the value asked for."""
    tokens, targets = task.split(batch)
    logits, _ = model(tokens)
    return (logits[:, -task.queries :].argmax(-1) == targets).float().mean().item()


def ablated_accuracy(model: HybridModel, task: Task, batch: Tensor) -> float:
    """The accuracy with every KDA layer's output replaced by zero."""
    layers = [m for m in model.modules() if isinstance(m, KimiDeltaAttention)]
    hooks = [layer.register_forward_hook(_zero_output) for layer in layers]
    try:
        return accuracy(model, task, batch)
    finally:
        for hook in hooks:
            hook.remove()


def _zero_output(layer: nn.Module, inputs: tuple, output: tuple) -> tuple:
    return torch.zeros_like(output[0]), output[1]


class Curriculum:
    """Raises the number of different pairs whenever the present number is mastered."""

    def __init__(self, model: HybridModel, task: Task, generator: torch.Generator, device):
        self.model, self.task, self.generator, self.device = model, task, generator, device
        self.distinct = min(_FIRST_DISTINCT, task.pairs)

    def sample(self, batch_size: int) -> Tensor:
        return self.task.sample(batch_size, self.generator, self.distinct).to(self.device)

    def finished(self, step: int) -> bool:
        """Whether the whole task is mastered; looks every few steps."""
        if step % _CHECK_EVERY:
            return False
        reached = accuracy(self.model, self.task, self.sample(_CHECK_SEQUENCES))
        if self.distinct == self.task.pairs:
            return reached >= _GOAL
        if reached >= _RAISE:
            self.distinct = min(2 * self.distinct, self.task.pairs)
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, help="default: 8 on cpu, 32 on cuda")
    parser.add_argument("--length", type=int, help="tokens; default: 8 per pair")
    parser.add_argument("--keys", type=int, help="different keys; default: twice the pairs")
    parser.add_argument("--size", type=int, help="width; default: 64 on cpu, 128 on cuda")
    parser.add_argument("--batch", type=int, help="sequences; default: 16 on cpu, 128 on cuda")
    parser.add_argument("--steps", type=int, help="most steps; default: 400 on cpu, 2000 on cuda")
    parser.add_argument("--seconds", type=float, default=90.0, help="most seconds of training")
    parser.add_argument("--rate", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index>; default: cuda if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="train without torch.compile")


def run(args: argparse.Namespace) -> int:
    for name in ("pairs", "length", "keys", "size", "batch", "steps", "seconds", "rate"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise DemoError(f"--{name} must be positive, got {value}", 2)
    if args.size is not None and (args.size % 2 or args.size > 512):
        raise DemoError(f"--size must be even and at most 512, got {args.size}", 2)
    device = resolve_device(args.device)
    if not args.eager:
        check_compiler(device)
    on_cuda = device.type == "cuda"
    pairs = args.pairs or (32 if on_cuda else 8)
    task = Task(pairs, args.length or 8 * pairs, args.keys or 2 * pairs)
    config = model_config(task, args.size or (128 if on_cuda else 64))
    batch_size = args.batch or (128 if on_cuda else 16)

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    recorder = GraphRecorder()
    with one_sentence_errors(device):
        with torch.device(device):
            model = HybridModel(config)
        curriculum = Curriculum(model, task, generator, device)
        print(
            f"{task.pairs} pairs of {task.keys} keys and values, {task.length} tokens; two KDA "
            f"layers of width {config.hidden_size}, {device}",
            flush=True,
        )

        def loss(batch: Tensor) -> Tensor:
            return recall_loss(model, task, batch)

        if not args.eager:
            loss = torch.compile(loss, fullgraph=True, dynamic=False, backend=recorder)
        outcome = train(
            model,
            loss,
            lambda: curriculum.sample(batch_size),
            Schedule(args.steps or (2000 if on_cuda else 400), args.seconds, args.rate),
            dtype=torch.float32,
            unit=1.0,
            unit_name="loss",
            finished=curriculum.finished,
        )
        test = task.sample(2 * _CHECK_SEQUENCES, generator).to(device)
        reached = accuracy(model, task, test)
        ablated = ablated_accuracy(model, task, test)
    if not args.eager:
        print(recorder.report())
    print(f"accuracy after {outcome.steps} steps: {reached:.1%} on new sequences")
    print(f"with KDA's output replaced by zero: {ablated:.1%}, chance {1 / task.keys:.1%}")
    return 130 if outcome.interrupted else 0
