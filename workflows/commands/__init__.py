"""The command line, a module a command: each adds its options and prints what the folders beside this one find out."""
