"""How the program of a Python interpreter is named."""

PROGRAM = r"python[\d.]*t?"  # a pattern of re; t: free-threaded
