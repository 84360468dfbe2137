"""The whole model: embedding, the looped layers, the head."""
