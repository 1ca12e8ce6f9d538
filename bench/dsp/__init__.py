"""Measurements of DSP, whose stages shard different dimensions, beside other methods."""
