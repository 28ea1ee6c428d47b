"""A small hybrid language model: recurrent layers with a full-attention layer in between."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flaop.nn.attention import Attention
from flaop.nn.deltanet import DeltaNet
from flaop.nn.gated_deltanet import GatedDeltaNet
from flaop.nn.gla import GatedLinearAttention
from flaop.nn.kda import KimiDeltaAttention
from flaop.nn.mamba2 import Mamba2Mixer
from flaop.nn.mlp import SwiGLU
from flaop.nn.norm import RMSNorm
from flaop.nn.retention import LightningAttention, MultiScaleRetention
from flaop.nn.slots import SlotCache, Slots

# A layer class has from_config(config, layer_idx), forward(x, state, cu_seqlens, output_state)
# -> (y, state), make_cache(num_slots, max_length, state_dtype), and
# extend(x, cache, state_indices, cu_seqlens) -> y.
LAYERS: dict[str, type[nn.Module]] = {
    "kda": KimiDeltaAttention,
    "gla": GatedLinearAttention,
    "retention": MultiScaleRetention,
    "lightning": LightningAttention,
    "mamba2": Mamba2Mixer,
    "gdn": GatedDeltaNet,
    "deltanet": DeltaNet,
    "attention": Attention,
}


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Shape of a HybridModel.

    Args:
        layers: names from LAYERS, repeated in turn until num_layers are filled.
        intermediate_size: width of the SwiGLU layer; None is 8/3 of hidden_size, rounded up to
            a multiple of 64.

    The others are the arguments of the layers; each layer takes those that it has.
    """

    vocab_size: int = 256
    hidden_size: int = 256
    num_layers: int = 4
    layers: tuple[str, ...] = ("kda", "kda", "kda", "attention")
    num_heads: int = 4
    head_dim: int = 64
    num_v_heads: int | None = None
    head_v_dim: int | None = None
    intermediate_size: int | None = None
    conv_size: int = 4
    gate: str = "softplus"
    lower_bound: float = -5.0
    dt_range: tuple[float, float] = (1e-3, 1e-1)
    allow_neg_eigval: bool = False
    norm_eps: float = 1e-5
    state_v_first: bool = False
    backend: str | None = None
    gate_low_rank_dim: int = 16
    gate_logit_normalizer: float = 16.0

    def __post_init__(self):
        for name in ("layers", "dt_range"):  # lists where they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        unknown = sorted(set(self.layers) - set(LAYERS))
        if unknown or not self.layers:
            raise ValueError(f"layers must be names of {sorted(LAYERS)}, got {list(self.layers)}")
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def layer_names(self) -> list[str]:
        return [self.layers[i % len(self.layers)] for i in range(self.num_layers)]

    def mlp_size(self) -> int:
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-self.hidden_size * 8 // 3 // 64) * 64


class HybridBlock(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: HybridConfig, layer_idx: int):
        super().__init__()
        layer = LAYERS[config.layer_names()[layer_idx]]
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = layer.from_config(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size())

    def forward(self, x, state=None, cu_seqlens=None, output_state=False):
        y, state = self.mixer(self.mixer_norm(x), state, cu_seqlens, output_state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state

    def extend(
        self, x: Tensor, cache: SlotCache, slots: Slots, cu_seqlens: Tensor | None
    ) -> Tensor:
        x = x + self.mixer.extend(self.mixer_norm(x), cache, slots, cu_seqlens)
        return x + self.mlp(self.mlp_norm(x))


class HybridCache(SlotCache):
    """One cache per layer, all of the same slots."""

    def __init__(self, layers: list[SlotCache]):
        super().__init__(layers[0].num_slots)
        self.layers = nn.ModuleList(layers)


class HybridModel(nn.Module):
    """Token embedding, pre-norm blocks, final norm, and the embedding again as output matrix.

    Args:
        config: its shape.
        context_parallel: ranks that hold shards of the sequences, see set_context_parallel.
    """

    def __init__(self, config: HybridConfig, context_parallel=None):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(HybridBlock(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.reset_parameters()
        if context_parallel is not None:
            self.set_context_parallel(context_parallel)

    def set_context_parallel(self, group) -> None:
        """From now on tokens are this rank's shard of sequences, and cu_seqlens global.

        Args:
            group: a ProcessGroup, a DeviceMesh of one dimension, (mesh, dimension), or None: no
                shards. Every rank takes part in every call and every backward.
        """
        for block in self.blocks:
            block.mixer.set_context_parallel(group)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Projections that keep the variance; those onto the residual stream scaled down."""
        for name, parameter in self.named_parameters():
            if name.endswith("_proj.weight"):
                onto_residual = name.split(".")[-2] in ("o_proj", "out_proj", "down_proj")
                scale = (2 * self.config.num_layers) ** -0.5 if onto_residual else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)
        nn.init.normal_(self.embedding.weight, std=self.config.hidden_size**-0.5)

    def forward(
        self,
        tokens: Tensor,  # [B, T]
        states: tuple | None = None,
        cu_seqlens: Tensor | None = None,  # [N + 1]
        output_states: bool = False,
    ) -> tuple[Tensor, tuple | None]:
        """Logits [B, T, vocab_size], and the states of the layers or None.

        Args:
            tokens: [B, T] int64; B = 1 with cu_seqlens.
            states: one state per layer, as returned by an earlier call; None starts afresh.
            cu_seqlens: [N + 1] int32 or int64, bounds of packed sequences.
            output_states: whether to return the states after the piece.
        """
        x = self.embedding(tokens)
        new_states = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i], cu_seqlens, output_states)
            new_states.append(state)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits, tuple(new_states) if output_states else None

    def make_cache(
        self, num_slots: int, max_length: int, state_dtype: torch.dtype | None = None
    ) -> HybridCache:
        """Static buffers for num_slots sequences of at most max_length tokens.

        Recurrent states are in state_dtype: float32 (None), bfloat16 or float16.
        """
        mixers = [block.mixer for block in self.blocks]
        return HybridCache([m.make_cache(num_slots, max_length, state_dtype) for m in mixers])

    @torch.no_grad()
    def extend(
        self,
        tokens: Tensor,  # [B, T]
        cache: HybridCache,
        state_indices: Tensor | None = None,  # [N]
        cu_seqlens: Tensor | None = None,  # [N + 1]
    ) -> Tensor:
        """Logits [B, T, vocab_size] of tokens that follow what the cache's slots hold.

        Serves prefill (chunk ops) and decode (up to 8 tokens, step ops). Updates the slots in
        place and reads nothing on the host: one token of it is a step to capture in a CUDA graph.

        Args:
            tokens: [B, T] int32 or int64; B = 1 with cu_seqlens.
            cache: from make_cache.
            state_indices: [N] int32 or int64, the slot of each sequence, none twice; a negative
                one is padding: no slot changes and its logits mean nothing. None: 0, 1, 2, ...
            cu_seqlens: [N + 1] int32 or int64, bounds of packed sequences.
        """
        slots = cache.select(state_indices, tokens, cu_seqlens)
        x = self.embedding(tokens)
        for block, layer_cache in zip(self.blocks, cache.layers, strict=True):
            x = block.extend(x, layer_cache, slots, cu_seqlens)
        return F.linear(self.norm(x), self.embedding.weight)
