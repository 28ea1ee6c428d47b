"""The training loop of both demos."""

import contextlib
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flaop.demo.runtime import Interrupt, progress_bar

_LOG_EVERY = 10  # steps between host reads of the loss on CUDA


class Schedule(NamedTuple):
    """Linear warm-up, then a cosine to a tenth; ends at `steps` or after `seconds`."""

    steps: int
    seconds: float
    peak: float
    warmup: int = 20

    def rate(self, step: int, elapsed: float) -> float:
        done = min(1.0, max(step / self.steps, elapsed / self.seconds))
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        return self.peak * cosine * min(1.0, (step + 1) / self.warmup)


class Outcome(NamedTuple):
    steps: int
    interrupted: bool


def optimizer(model: nn.Module, rate: float, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def autocast(device: torch.device, dtype: torch.dtype):
    """Autocast to dtype; nothing for float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def train(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    next_batch: Callable[[], Tensor],
    schedule: Schedule,
    *,
    dtype: torch.dtype,
    unit: float,
    unit_name: str,
    finished: Callable[[int], bool] | None = None,
) -> Outcome:
    """Trains until the schedule ends, `finished(step)` says so, or Ctrl-C.

    The first step compiles; the time limit and tokens per second count from its end. The bar
    shows the loss times `unit`.
    """
    device = next(model.parameters()).device
    adamw = optimizer(model, schedule.peak)
    step, elapsed = 0, 0.0
    with Interrupt() as interrupt, progress_bar(schedule.steps, "train") as bar:
        try:
            while step < schedule.steps and elapsed < schedule.seconds:
                for group in adamw.param_groups:
                    group["lr"] = schedule.rate(step, elapsed)
                batch = next_batch()
                with autocast(device, dtype):
                    value = loss(batch)
                value.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                adamw.step()
                adamw.zero_grad(set_to_none=True)
                step += 1
                last = step == schedule.steps
                if step == 1 or last or step % _LOG_EVERY == 0 or device.type == "cpu":
                    shown = {unit_name: f"{value.item() * unit:.3f}"}
                    if step == 1:
                        start = time.monotonic()
                    else:
                        elapsed = time.monotonic() - start
                        shown["tokens/s"] = f"{(step - 1) * batch.numel() / elapsed:,.0f}"
                    bar.set_postfix(shown, refresh=False)
                bar.update()
                if (finished is not None and finished(step)) or interrupt.asked:
                    break
        except KeyboardInterrupt:
            interrupt.asked = True
    return Outcome(step, interrupt.asked)
