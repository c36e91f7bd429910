Linear = AttentionHead = MultiHeadAttention = SpatialAttention = Embedding = patchify = unpatchify = (
    sinusoidal_positions
) = None
