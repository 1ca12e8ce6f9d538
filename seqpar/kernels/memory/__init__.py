"""What moves memory and computes nothing or little: copies, rows of tensors, small arrays to a device, rotation."""
