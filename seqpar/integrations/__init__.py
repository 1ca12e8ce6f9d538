"""Other libraries' attention under a plan: PyTorch's own functions, transformers, diffusers."""
