"""Attention: the verb in `api`, its op in `op`, one call in `signature` and `call`, who computes when in `schedule`."""
