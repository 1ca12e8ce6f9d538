"""transformers models under a plan: their attention, whether ranks can compute them, and the forward on all ranks."""
