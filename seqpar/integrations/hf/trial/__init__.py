"""What a transformers model computes outside attention and known mixers, found out before it becomes parallel."""
