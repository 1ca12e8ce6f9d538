"""Measurements on the processors of this machine."""
