"""transformers models under a plan: their attention, whether they fit, and the forward that shares a batch out."""
