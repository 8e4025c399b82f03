"""Recordings and snapshots as they are read: events, moments, stacks, steps."""
