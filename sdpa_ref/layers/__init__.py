"""Layers over `sdpa_ref.sdpa` that load what the PyTorch modules with the same attribute names save."""

from sdpa_ref.layers.activations import gelu, gelu_derivative, silu, silu_derivative
from sdpa_ref.layers.files import read_weights
from sdpa_ref.layers.gradients import LayerGradients
from sdpa_ref.layers.head import AttentionHead
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.linear import Conv1x1, Linear
from sdpa_ref.layers.multi_head import MultiHeadAttention
from sdpa_ref.layers.norms import LayerNorm, RMSNorm
from sdpa_ref.layers.rotary import Rotary, rotary, rotary_vjp
from sdpa_ref.layers.scalings import DynamicScaling, LinearScaling, Llama3Scaling, Scaling, YarnScaling
from sdpa_ref.layers.spatial import SpatialAttention, patchify, unpatchify
from sdpa_ref.layers.tokens import Embedding, sinusoidal_positions

__all__ = [
    "AttentionHead",
    "Conv1x1",
    "DynamicScaling",
    "Embedding",
    "Layer",
    "LayerGradients",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "MultiHeadAttention",
    "RMSNorm",
    "Rotary",
    "Scaling",
    "SpatialAttention",
    "YarnScaling",
    "gelu",
    "gelu_derivative",
    "patchify",
    "read_weights",
    "rotary",
    "rotary_vjp",
    "silu",
    "silu_derivative",
    "sinusoidal_positions",
    "unpatchify",
]
