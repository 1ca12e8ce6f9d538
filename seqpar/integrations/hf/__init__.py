"""transformers models under a plan: their attention, what of them fits, and the forward that shares a batch out."""
