"""The loops whose allocations are measured: real torch, recorded on the host-memory runtime."""
