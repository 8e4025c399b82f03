"""What starts other processes or enters them: dry runs, `pyalloc run`, `pyalloc attach`."""
