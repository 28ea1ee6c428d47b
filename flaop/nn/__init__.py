"""Layers built on flaop's operators, and a small hybrid language model."""

from flaop.nn.attention import Attention, AttentionCache, AttentionState
from flaop.nn.conv import ShortConvolution
from flaop.nn.deltanet import DeltaNet
from flaop.nn.gated_deltanet import GatedDeltaNet
from flaop.nn.gla import GatedLinearAttention
from flaop.nn.kda import KimiDeltaAttention, KimiDeltaAttentionCache, KimiDeltaAttentionState
from flaop.nn.mamba2 import Mamba2Mixer, Mamba2State
from flaop.nn.mlp import SwiGLU
from flaop.nn.model import LAYERS, HybridBlock, HybridCache, HybridConfig, HybridModel
from flaop.nn.norm import GatedRMSNorm, RMSNorm
from flaop.nn.recurrent import LinearAttentionState, StateCache
from flaop.nn.retention import LightningAttention, MultiScaleRetention
from flaop.nn.slots import SlotCache, Slots

__all__ = [
    "LAYERS",
    "Attention",
    "AttentionCache",
    "AttentionState",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "HybridBlock",
    "HybridCache",
    "HybridConfig",
    "HybridModel",
    "KimiDeltaAttention",
    "KimiDeltaAttentionCache",
    "KimiDeltaAttentionState",
    "LightningAttention",
    "LinearAttentionState",
    "Mamba2Mixer",
    "Mamba2State",
    "MultiScaleRetention",
    "RMSNorm",
    "ShortConvolution",
    "SlotCache",
    "Slots",
    "StateCache",
    "SwiGLU",
]
