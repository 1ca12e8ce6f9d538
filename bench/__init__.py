"""What seqpar promises, measured: see README.md."""
