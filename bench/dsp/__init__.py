"""Stages that shard other dimensions, beside other methods."""
