"""What every collective op shares: agreement of ranks, handles for plans and comms, row numbers on a device."""
