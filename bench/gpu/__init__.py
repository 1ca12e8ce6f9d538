"""Checked and timed on one GPU, or compiled for GPUs that need not be present."""
