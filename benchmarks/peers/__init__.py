"""Other libraries' allocators, built as torch's pluggable allocator wants them."""
