"""Measurements of plans: time to plan, distance to the bound, and the plans of other policies."""
