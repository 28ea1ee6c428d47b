"""Token-by-token decoding from static buffers; on CUDA the whole step replays as one graph."""

import torch
from torch import Tensor, nn

MODES = ("eager", "compiled", "captured")


class Decoder:
    """Prefills a prompt, then decodes one token per step for each sequence of a batch.

    Nothing in a step depends on the host: token, caches, history and its fill position are
    buffers on the device, so a captured step replays without arguments.

    Args:
        model: has make_cache(batch_size, max_length) and extend(tokens, cache) -> logits,
            like flaop.nn.HybridModel.
        batch_size: number of sequences B.
        max_length: most tokens per sequence, prompt included.
        mode: "eager", "compiled" (torch.compile, one graph), or "captured" (the compiled step
            in a CUDA graph; needs a CUDA model).
        temperature: 0 takes the likeliest token, otherwise samples from the softmax.
        backend: the torch.compile backend.

    Attributes:
        logits: [B, vocab_size], of the last token, in a static buffer.
        length: number of tokens in the caches.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int = 1,
        max_length: int = 2048,
        *,
        mode: str = "captured",
        temperature: float = 0.0,
        backend="inductor",
    ):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        if temperature < 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        device = next(model.parameters()).device
        if mode == "captured" and device.type != "cuda":
            raise ValueError(f"mode 'captured' needs a model on a CUDA device, got {device}")
        self.model = model
        self.temperature = temperature
        self.max_length = max_length
        self.length = 0
        self.cache = model.make_cache(batch_size, max_length)
        self._token = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        self._history = torch.zeros(batch_size, max_length, dtype=torch.long, device=device)
        self._count = torch.zeros(1, dtype=torch.long, device=device)
        self._extend = model.extend
        if mode != "eager":
            self._extend = torch.compile(
                model.extend, fullgraph=True, dynamic=False, backend=backend
            )
        with torch.no_grad():
            # one eager step gives the shape and dtype of the logits
            self.logits = model.extend(self._token, self.cache)[:, -1].clone()
        self._replay = self._capture(device) if mode == "captured" else self._step
        self.reset()

    def reset(self) -> None:
        """Forgets everything, for another prompt."""
        self.length = 0
        self.cache.reset()
        for buffer in (self._token, self._history, self._count):
            buffer.zero_()

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Appends tokens [B, T] to the caches by the chunk path; returns their logits [B, T, *]."""
        self._reserve(tokens.shape[1])
        logits = self.model.extend(tokens, self.cache)
        self.logits.copy_(logits[:, -1])
        self._choose()
        return logits

    @torch.no_grad()
    def step(self) -> None:
        """Feeds the chosen token, leaves its logits in `logits`, and chooses the next one."""
        self._reserve(1)
        self._replay()

    def generate(self, steps: int) -> Tensor:
        """Takes `steps` more steps; returns all tokens chosen since the last reset [B, *]."""
        self._reserve(steps)
        self.length -= steps
        for _ in range(steps):
            self.step()
        return self.tokens()

    def tokens(self) -> Tensor:
        """All tokens chosen since the last reset, [B, *]; the last has not been fed yet."""
        return self._history[:, : int(self._count)].clone()

    def _reserve(self, count: int) -> None:
        if self.length + count > self.max_length:
            raise ValueError(
                f"{count} more tokens after {self.length} exceed max_length = {self.max_length}"
            )
        self.length += count

    def _step(self) -> None:
        self.logits.copy_(self._extend(self._token, self.cache)[:, -1])
        self._choose()

    def _choose(self) -> None:
        scores = self.logits
        if self.temperature:
            # the largest of logit / temperature + Gumbel noise is a draw from the softmax
            noise = torch.empty_like(scores, dtype=torch.float32).exponential_()
            scores = scores.float() / self.temperature - noise.log()
        self._token.copy_(scores.argmax(-1, keepdim=True))
        self._history.index_copy_(1, self._count, self._token)
        self._count.add_(1)

    @torch.no_grad()
    def _capture(self, device):
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # warm-up: compiles, loads kernels, and lets libraries make their workspaces
                for _ in range(3):
                    self.reset()
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            self.reset()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
        self._graph = graph
        return graph.replay
