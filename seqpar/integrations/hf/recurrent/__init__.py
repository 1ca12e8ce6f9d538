"""Recurrent layers of transformers models on this rank's rows: one file for each kind, and the table of their modules.

A *mixer* is the module of a layer in which tokens meet other than by attention. Here its forward is written again: with
the module's own projections, gates and norms, row by row, and with `seqpar.recurrent` where tokens meet.
"""
