"""The command line, a module a command. Each adds its options, and prints the results of the other folders."""
