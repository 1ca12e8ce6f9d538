"""Rows and slices that change ranks: `switch` and `relayout`, packed by `pack`."""
