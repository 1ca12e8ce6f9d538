"""Calls of seqpar's public API whose results are digested bit by bit: the same code runs on two versions of it.

Only public names are imported, as internal ones move. `groups.py` has the list; `python -m bench.bits` runs it.
"""
