"""Exact, balanced long-context attention over many ranks."""

__version__ = "0.1.0"
