"""Recurrent layers over a plan: rows of neighbours, short convolutions, and states that pass from run to run."""
