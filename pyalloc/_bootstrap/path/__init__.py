"""This folder precedes the program's modules on sys.path: any other file in it would hide a module of that name."""
