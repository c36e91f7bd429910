"""Layers over `sdpa_ref.sdpa` that load what the PyTorch modules with the same attribute names save."""

from sdpa_ref.layers.activations import gelu, gelu_derivative, silu, silu_derivative
from sdpa_ref.layers.gradients import LayerGradients
from sdpa_ref.layers.head import AttentionHead
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.linear import Conv1x1, Linear
from sdpa_ref.layers.multi_head import MultiHeadAttention
from sdpa_ref.layers.spatial import SpatialAttention, patchify, unpatchify
from sdpa_ref.layers.tokens import Embedding, sinusoidal_positions

__all__ = [
    "AttentionHead",
    "Conv1x1",
    "Embedding",
    "Layer",
    "LayerGradients",
    "Linear",
    "MultiHeadAttention",
    "SpatialAttention",
    "gelu",
    "gelu_derivative",
    "patchify",
    "silu",
    "silu_derivative",
    "sinusoidal_positions",
    "unpatchify",
]
