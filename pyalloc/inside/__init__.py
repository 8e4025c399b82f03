"""What runs in the program's own process: torch's functions on pyalloc, recording, answering."""
