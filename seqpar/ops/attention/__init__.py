"""Attention: the verb in `api`, one call in `call`, who computes when in `schedule`, the op of graphs in `graph`."""
