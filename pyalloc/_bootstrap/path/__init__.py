"""On PYTHONPATH and sys.path, before the program's own modules: anything else here would hide one of them."""
