"""Measured on this machine's processors."""
