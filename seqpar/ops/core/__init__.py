"""What collective ops share: agreement of ranks, handles of plans and comms, one helper for ops, a device's facts."""
