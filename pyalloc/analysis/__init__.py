"""What a recording means: who holds the memory, what is idle, what to change.  Data in, data out."""
