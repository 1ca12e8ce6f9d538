"""Rows and slices that change ranks: `switch`, `relayout`, and how both are packed in `pack`."""
