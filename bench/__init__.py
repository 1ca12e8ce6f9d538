"""Measurements of what seqpar promises; README.md maps each claim to its command and record."""
