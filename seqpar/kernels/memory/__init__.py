"""Functions that mostly move memory: copies, rows of tensors, small arrays to a device, rotation."""
