"""Checks and timings on one GPU, and binaries compiled for GPUs that need not be present."""
