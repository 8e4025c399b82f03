"""Other libraries' allocators, behind torch's interface for pluggable allocators."""
