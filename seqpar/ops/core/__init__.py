"""Shared by collective ops: agreement of ranks, handles of plans and comms, one helper for ops, device uploads."""
