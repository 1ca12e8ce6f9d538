"""Rows and slices that change ranks: `switch`, `relayout` and `fetch`, packed by `pack`."""
