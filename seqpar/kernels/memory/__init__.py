"""Functions that mostly move memory: copies and sums of rows, small arrays to a device, rotation."""
