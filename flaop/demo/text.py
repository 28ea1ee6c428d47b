"""`python -m flaop demo`: a byte-level language model trains, is saved, reloaded, and generates."""

import argparse
import math
import pathlib
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flaop.decode import CapturedDecoder, StatePool
from flaop.demo import corpus
from flaop.demo.runtime import (
    DemoError,
    GraphRecorder,
    check_compiler,
    check_memory,
    check_output,
    load_checkpoint,
    one_sentence_errors,
    resolve_device,
    save_checkpoint,
)
from flaop.demo.training import Schedule, autocast, train
from flaop.nn import LAYERS, HybridConfig, HybridModel

# hidden_size, num_heads, head_dim, layers, tokens per sequence, sequences per batch, peak rate
SIZES = {
    "tiny": (64, 2, 32, 4, 96, 4, 3e-3),
    "small": (128, 2, 64, 4, 256, 4, 4e-3),
    "base": (512, 4, 128, 8, 1024, 32, 1.5e-3),
    "large": (1024, 8, 128, 12, 2048, 16, 8e-4),
}
KINDS = tuple(name for name in LAYERS if name != "attention")
_PROMPT = 192  # bytes, enough to be prefilled by the chunk path
_TEMPERATURE = 0.7  # of the bytes generated
_EVALUATION = 16  # batches of validation windows

# Largest relative difference between the logits of decode and of a full re-run.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, help="default: small on cpu, base on cuda")
    parser.add_argument(
        "--layers",
        type=_layers,
        metavar="KIND",
        help=f"layers beside the attention layer in every fourth place: {', '.join(KINDS)} "
        "(default: kda); a number is the same as --depth",
    )
    parser.add_argument("--depth", type=int, help="number of layers, every fourth is attention")
    parser.add_argument("--batch", type=int, help="sequences per batch")
    parser.add_argument("--steps", type=int, default=1000, help="most training steps")
    parser.add_argument(
        "--seconds",
        type=float,
        help="most seconds of training after compilation; default: 100 on cpu, 60 on cuda",
    )
    parser.add_argument("--tokens", type=int, help="bytes to generate; default: 64 or 512")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index>; default: cuda if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("flaop-demo.safetensors"),
        help="the checkpoint (default: %(default)s)",
    )


def _layers(text: str) -> str | int:
    """A kind of layer, or their number."""
    if text in KINDS:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither one of {', '.join(KINDS)} nor a number"
        ) from None


def run(args: argparse.Namespace) -> int:
    kind = args.layers if isinstance(args.layers, str) else "kda"
    depth = args.layers if isinstance(args.layers, int) else args.depth
    if args.depth is not None and depth != args.depth:
        raise DemoError(f"--layers {args.layers} and --depth {args.depth} exclude each other", 2)
    depth_name = "layers" if isinstance(args.layers, int) else "depth"
    numbers = {n: getattr(args, n) for n in ("batch", "steps", "seconds", "tokens")}
    for name, value in {depth_name: depth, **numbers}.items():
        if value is not None and not value > 0:
            raise DemoError(f"--{name} must be positive, got {value}", 2)
    device = resolve_device(args.device)
    check_compiler(device)
    check_output(args.output)
    on_cuda = device.type == "cuda"
    size = args.size or ("base" if on_cuda else "small")
    hidden_size, num_heads, head_dim, layers, length, batch_size, rate = SIZES[size]
    batch_size = args.batch or batch_size
    dtype = torch.bfloat16 if on_cuda else torch.float32
    config = HybridConfig(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        num_layers=depth or layers,
        layers=(kind,) * 3 + ("attention",),
    )
    check_memory(device, _needed_bytes(config, batch_size * length))

    torch.manual_seed(args.seed)
    with one_sentence_errors(device):
        text = corpus.load()
        with torch.device(device):
            model = HybridModel(config)
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{text.files} files, {text.train.numel():,} training bytes; "
            f"{' '.join(config.layer_names())}, {count:,} parameters, {device}, "
            f"{str(dtype).removeprefix('torch.')}",
            flush=True,
        )
        recorder = GraphRecorder()
        loss = torch.compile(_loss, fullgraph=True, dynamic=False, backend=recorder)
        seconds = args.seconds or (60 if on_cuda else 100)
        schedule = Schedule(args.steps, seconds, rate, warmup=100 if on_cuda else 20)
        outcome = train(
            model,
            lambda batch: loss(model, batch),
            _sampler(text.train.to(device), batch_size, length + 1, args.seed),
            schedule,
            dtype=dtype,
            unit=1 / math.log(2),
            unit_name="bits/byte",
        )
        if not outcome.steps:
            raise DemoError("interrupted before the first step was done, nothing is saved", 130)
        save_checkpoint(model, args.output, outcome.steps)
        print(f"checkpoint after {outcome.steps} steps: {args.output}", flush=True)
        if outcome.interrupted:
            return 130

        held_out = corpus.windows(text.validation, _EVALUATION * batch_size, length + 1)
        before = _evaluate(loss, model, held_out.split(batch_size), dtype)
        model = load_checkpoint(args.output, device)
        after = _evaluate(loss, model, held_out.split(batch_size), dtype)
        print(f"validation loss  {before:.4f} bits per byte, after the reload {after:.4f}")
        print(f"unigram table    {corpus.unigram_loss(text.train, held_out):.4f}")
        print(f"bigram table     {corpus.bigram_loss(text.train, held_out):.4f}", flush=True)

        _cast_projections(model, dtype)
        prompt = text.validation[:_PROMPT].long().to(device)[None]
        agrees = _generate(model, prompt, args.tokens or (512 if on_cuda else 64), recorder, dtype)
    print(recorder.report())
    if not agrees:
        raise DemoError("the logits of decode and of the full re-run disagree")
    return 0


def _loss(model: HybridModel, batch: Tensor) -> Tensor:
    batch = batch.long()
    logits, _ = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def _cast_projections(model: HybridModel, dtype: torch.dtype) -> None:
    """Casts matrices and the biases that go with them; norms and gates keep their vectors."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() >= 2 or isinstance(module, nn.Linear):
                parameter.data = parameter.data.to(dtype)


def _sampler(text: Tensor, batch_size: int, length: int, seed: int):
    """Batches [batch_size, length] at random places of the text."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length, device=text.device)

    def sample() -> Tensor:
        starts = torch.randint(text.numel() - length, (batch_size, 1), generator=generator)
        return text[starts.to(text.device) + offsets]

    return sample


@torch.no_grad()
def _evaluate(loss, model: HybridModel, batches: tuple[Tensor, ...], dtype) -> float:
    """Mean loss in bits over all windows."""
    device = next(model.parameters()).device
    with autocast(device, dtype):
        losses = [loss(model, batch.to(device)) for batch in batches]
    return torch.stack(losses).mean().item() / math.log(2)


def _generate(model, prompt: Tensor, count: int, recorder, dtype) -> bool:
    """Decodes in every mode, prints speeds and text; whether decode and a full re-run agree."""
    device = prompt.device
    best = "captured" if device.type == "cuda" else "compiled"
    pool = StatePool(model, 1, max_length=prompt.shape[1] + count)
    pool.allocate()
    speeds = {}
    for mode in dict.fromkeys(("eager", "compiled", best)):
        decoder = CapturedDecoder(
            model, pool, (1,), mode=mode, temperature=_TEMPERATURE, backend=recorder
        )
        speeds[mode], logits, chosen = _decode(decoder, prompt, count)
    print(
        f"decode, tokens/s: {', '.join(f'{m} {s:,.1f}' for m, s in speeds.items())}"
        + ("" if best == "captured" else " (CUDA graphs need a GPU)")
    )
    with torch.no_grad():
        full, _ = model(torch.cat([prompt, chosen[:, :-1]], dim=1))
    full = full[:, prompt.shape[1] :].float()
    difference = ((logits - full).norm() / full.norm()).item()
    tolerance = _TOLERANCE[dtype]
    print(
        f"{best} decode against a full re-run: relative difference of the logits {difference:.1e} "
        f"(tolerance {tolerance:.0e}), largest {(logits - full).abs().max().item():.1e}"
    )
    print("--- prompt", _show(prompt[0]), "--- continuation", _show(chosen[0]), "---", sep="\n")
    return difference <= tolerance


def _decode(decoder: CapturedDecoder, prompt: Tensor, count: int) -> tuple[float, Tensor, Tensor]:
    """Tokens per second after a warm-up, the logits [1, count, 256], the tokens [1, count + 1]."""
    slots = decoder.pool.indices(0)
    for steps in (2, count):
        decoder.pool.reset(0)
        tokens, logits = [decoder.choose(decoder.prefill(prompt, slots))], []
        tokens[0].tolist()  # waits for the device
        start = time.perf_counter()
        for i in range(steps):
            step_logits = decoder.step() if i else decoder.step(tokens[0], slots)
            logits.append(step_logits.clone())
            tokens.append(decoder.chosen.clone())
        chosen = torch.stack(tokens, dim=1)
        chosen.tolist()
        seconds = time.perf_counter() - start
    return count / seconds, torch.stack(logits, dim=1).float(), chosen


def _show(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode("utf-8", "replace")


def _needed_bytes(config: HybridConfig, tokens: int) -> int:
    """Rough bytes of training: parameters with AdamW, and float32 activations."""
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    matrices = 5 * width * heads + 3 * width * config.mlp_size()
    kept = 16 * heads + 6 * width + 4 * config.mlp_size()
    return config.num_layers * (16 * matrices + 4 * tokens * kept)
