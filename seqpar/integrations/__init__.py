"""Third parties' attention under a plan: PyTorch's own functions, transformers, diffusers."""
