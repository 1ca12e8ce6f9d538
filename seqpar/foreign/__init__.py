"""Models that are not seqpar's: their code, hooks, weights and state, and how their forwards are replaced."""
