"""Decoding on slots: a pool of states, and a decoder that replays one CUDA graph per step."""

import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

MODES = ("captured", "compiled", "eager")


class StatePool(nn.Module):
    """Slots for the states of a model: recurrent states, convolution tails, keys and values.

    A slot holds one sequence. Which slots are taken is known on the host, what they hold lives on
    the device; no call reads the device.

    Args:
        model: has make_cache(num_slots, max_length, state_dtype), like flaop.nn.HybridModel.
        num_slots: number of slots.
        max_length: most tokens of a sequence that attention layers see; the others have no limit.
        state_dtype: of the recurrent states: float32 (None), bfloat16 or float16.

    Attributes:
        cache: the buffers, on the device of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        num_slots: int,
        max_length: int = 2048,
        state_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, value in (("num_slots", num_slots), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_slots, self.max_length = num_slots, max_length
        self.cache = model.make_cache(num_slots, max_length, state_dtype)
        self._free = list(range(num_slots))  # a heap
        self._taken: set[int] = set()

    @property
    def device(self) -> torch.device:
        return next(self.cache.buffers()).device

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int = 1) -> list[int]:
        """Takes `count` slots and zeroes them; raises RuntimeError if fewer are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > self.num_free:
            raise RuntimeError(
                f"no free slot: {count} wanted, {self.num_free} of {self.num_slots} are free"
            )
        slots = [heapq.heappop(self._free) for _ in range(count)]
        self._taken.update(slots)
        self.reset(slots)
        return slots

    def free(self, slots: int | Iterable[int]) -> None:
        """Gives slots back."""
        slots = self._check("slots", slots, once=True)
        self._taken.difference_update(slots)
        for slot in slots:
            heapq.heappush(self._free, slot)

    def reset(self, slots: int | Iterable[int]) -> None:
        """Zeroes slots, for other sequences."""
        slots = self._check("slots", slots)
        if slots:
            self.cache.reset(self._to_device(slots))

    def copy(self, src: int | Iterable[int], dst: int | Iterable[int]) -> None:
        """Copies slot src[i] to slot dst[i], for beams and shared prefixes.

        All of src are read before one of dst is written: slots may be in both.
        """
        src, dst = self._check("src", src), self._check("dst", dst, once=True)
        if len(src) != len(dst):
            raise ValueError(f"src and dst must be as many slots, got {len(src)} and {len(dst)}")
        if src:
            self.cache.copy(self._to_device(src), self._to_device(dst))

    def indices(self, slots: int | Iterable[int]) -> Tensor:
        """Slots as int64 indices on the device, for a decoder or model.extend."""
        return self._to_device(self._check("slots", slots, once=True))

    def _check(self, name: str, slots: int | Iterable[int], once: bool = False) -> list[int]:
        slots = [slots] if isinstance(slots, int) else list(slots)
        for slot in slots:
            if not isinstance(slot, int):
                raise TypeError(f"{name} must be Python integers, got a {type(slot).__name__}")
            if not 0 <= slot < self.num_slots:
                raise ValueError(
                    f"{name}: there is no slot {slot}, the pool has slots 0 to {self.num_slots - 1}"
                )
            if slot not in self._taken:
                raise ValueError(f"{name}: slot {slot} is free, it was not allocated")
        if once and len(set(slots)) < len(slots):
            raise ValueError(f"{name} must be different slots, got {slots}")
        return slots

    def _to_device(self, slots: list[int]) -> Tensor:
        index = torch.tensor(slots, dtype=torch.long)
        if self.device.type == "cuda":
            # from pinned memory the host does not wait
            return index.pin_memory().to(self.device, non_blocking=True)
        return index.to(self.device)


class _Step(NamedTuple):
    """A step of a fixed number of rows, and the part of it that is live."""

    inputs: Tensor  # [2 * size] int64: tokens, then slots
    no_tokens: Tensor  # [size - B] zeros
    no_slots: Tensor  # [size - B] of -1
    logits: Tensor  # [B, vocab_size]
    chosen: Tensor  # [B] int64
    run: Callable[[], None]


class CapturedDecoder:
    """Decodes one token per step for any batch of slots; on CUDA a step is one graph replay.

    A batch is padded with slots of -1 to the next of batch_sizes. Its tokens and slots go to the
    device's input buffer in one copy, then the graph of that size replays: nothing is read on the
    host. The step also chooses each row's next token and puts it where the next step reads, so
    that a further step of the same rows is the replay alone.

    Args:
        model: has extend(tokens, cache, state_indices, cu_seqlens) -> logits and make_cache, like
            flaop.nn.HybridModel.
        pool: a StatePool of the model.
        batch_sizes: numbers of rows to capture; the largest is the limit of a batch.
        mode: "captured" (the compiled step in a CUDA graph; needs a CUDA model), "compiled"
            (torch.compile, one graph) or "eager".
        temperature: of the tokens chosen: 0 takes the likeliest one, otherwise they are drawn from
            the softmax of logits / temperature.
        backend: the torch.compile backend.

    Attributes:
        chosen: [B] int64, the token that the last step chose for each row to follow its own.

    Making one compiles and captures; slots of the pool do not change.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: StatePool,
        batch_sizes: Sequence[int] = (1, 2, 4, 8),
        *,
        mode: str = "captured",
        temperature: float = 0.0,
        backend="inductor",
    ):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        if temperature < 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        if not batch_sizes or min(batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be positive, got {tuple(batch_sizes)}")
        if mode == "captured" and pool.device.type != "cuda":
            raise ValueError(
                f"mode 'captured' needs a model on a CUDA device, got {pool.device}: take mode "
                "'compiled' or 'eager'"
            )
        self.model, self.pool = model, pool
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.temperature = temperature
        self._extend = model.extend
        if mode != "eager":
            self._extend = torch.compile(model.extend, fullgraph=True, backend=backend)
        self._logits = self._make_logits()
        self._chosen = self._logits.new_empty(self.batch_sizes[-1], dtype=torch.long)
        self._memory = None
        if mode == "captured":
            self._memory = torch.cuda.graph_pool_handle()
        # the largest first: the others fit into its memory
        self._full = {size: self._make_step(size) for size in reversed(self.batch_sizes)}
        self._steps: dict[torch.Size, _Step] = {}  # by the shape of the tokens
        self._current: _Step | None = None
        self.chosen: Tensor | None = None

    @torch.no_grad()
    def prefill(self, tokens: Tensor, slots: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Appends prompts to slots, by the chunk path.

        Args:
            tokens: [N, T], prompts of one length; or [1, T] packed, with cu_seqlens.
            slots: [N] int32 or int64 on the device, from StatePool.indices; negative: skipped.
            cu_seqlens: [N + 1] int32 or int64 on the device, bounds of the prompts.

        Returns:
            Logits [N, vocab_size] after the last token of each prompt.
        """
        logits = self.model.extend(tokens, self.pool.cache, slots, cu_seqlens)
        if cu_seqlens is None:
            return logits[:, -1]
        return logits[0, (cu_seqlens[1:].long() - 1).clamp(min=0)]

    def step(self, tokens: Tensor | None = None, slots: Tensor | None = None) -> Tensor:
        """Feeds one token to each of B slots.

        Args:
            tokens: [B] int64 or int32 on the device. None: those that the last step chose, to the
                same slots.
            slots: [B] in the dtype of tokens (another costs more copies), from StatePool.indices;
                a negative one is a padding row.

        Returns:
            Logits [B, vocab_size]. They, and `chosen`, are valid until the next step.
        """
        step = self._current
        if tokens is not None:
            step = self._steps.get(tokens.shape)
            if step is None or slots is None or slots.shape != tokens.shape:
                step = self._new_step(tokens, slots)
            torch.cat((tokens, step.no_tokens, slots, step.no_slots), out=step.inputs)
            self._current, self.chosen = step, step.chosen
        elif step is None or slots is not None:
            raise ValueError("a step takes tokens and slots, or neither after one that took both")
        step.run()
        return step.logits

    def choose(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., vocab_size] -> [...] int64: the likeliest tokens, or a draw."""
        if self.temperature:
            # the largest of logit / temperature + Gumbel noise is a draw from the softmax
            noise = torch.empty_like(logits, dtype=torch.float32).exponential_()
            logits = logits.float() / self.temperature - noise.log()
        return torch.argmax(logits, -1, out=out)

    def _new_step(self, tokens: Tensor, slots: Tensor | None) -> _Step:
        """The step of the next size, with as many live rows as there are tokens."""
        if tokens.dim() != 1 or slots is None or slots.shape != tokens.shape:
            got = None if slots is None else list(slots.shape)
            raise ValueError(
                f"tokens and slots must be [B] both, got {list(tokens.shape)} and {got}"
            )
        (B,) = tokens.shape
        size = next((size for size in self.batch_sizes if size >= B), None)
        if size is None:
            raise ValueError(
                f"a batch of {B} rows is larger than the largest of batch_sizes {self.batch_sizes}"
            )
        full = self._full[size]
        step = full._replace(
            no_tokens=full.inputs.new_zeros(size - B),
            no_slots=full.inputs.new_full((size - B,), -1),
            logits=full.logits[:B],
            chosen=full.chosen[:B],
        )
        self._steps[tokens.shape] = step
        return step

    @torch.no_grad()
    def _make_logits(self) -> Tensor:
        """The buffer of the largest batch, shaped by one eager step of padding."""
        padding = torch.full((self.batch_sizes[0], 1), -1, device=self.pool.device)
        logits = self.model.extend(padding.clamp(min=0), self.pool.cache, padding[:, 0])[:, -1]
        return logits.new_empty(self.batch_sizes[-1], logits.shape[-1])

    def _make_step(self, size: int) -> _Step:
        inputs = torch.zeros(2 * size, dtype=torch.long, device=self.pool.device)
        tokens, slots = inputs[:size], inputs[size:].fill_(-1)
        column = tokens[:, None]
        if size > 1:
            # so that one compilation serves all sizes above 1
            torch._dynamo.maybe_mark_dynamic(column, 0)
            torch._dynamo.maybe_mark_dynamic(slots, 0)
        outputs = self._logits[:size], self._chosen[:size]
        run = functools.partial(self._run, column, slots, *outputs)
        if self._memory is not None:
            run = self._capture(run)
        none = inputs[:0]
        return _Step(inputs, none, none, *outputs, run)

    @torch.no_grad()
    def _run(self, tokens: Tensor, slots: Tensor, logits: Tensor, chosen: Tensor) -> None:
        logits.copy_(self._extend(tokens, self.pool.cache, slots)[:, -1])
        self.choose(logits, out=chosen)
        tokens.copy_(chosen[:, None])

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.pool.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # warm-up: compiles, loads kernels, and lets libraries make their workspaces
                for _ in range(3):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # by default torch takes one stream for all graphs, that of the first one's device
            with torch.cuda.graph(graph, pool=self._memory, stream=side):
                run()
        return graph.replay
