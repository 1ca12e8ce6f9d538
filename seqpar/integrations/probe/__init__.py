"""Whether what a model computes for a row is of that row alone but for its attention: tried, without gradients."""
