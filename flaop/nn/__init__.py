"""Layers built on flaop's operators, and a small hybrid language model."""

from flaop.nn.attention import Attention, AttentionCache, AttentionState
from flaop.nn.conv import ShortConvolution
from flaop.nn.kda import KimiDeltaAttention, KimiDeltaAttentionCache, KimiDeltaAttentionState
from flaop.nn.mlp import SwiGLU
from flaop.nn.model import LAYERS, HybridBlock, HybridCache, HybridConfig, HybridModel
from flaop.nn.norm import GatedRMSNorm, RMSNorm

__all__ = [
    "LAYERS",
    "Attention",
    "AttentionCache",
    "AttentionState",
    "GatedRMSNorm",
    "HybridBlock",
    "HybridCache",
    "HybridConfig",
    "HybridModel",
    "KimiDeltaAttention",
    "KimiDeltaAttentionCache",
    "KimiDeltaAttentionState",
    "RMSNorm",
    "ShortConvolution",
    "SwiGLU",
]
