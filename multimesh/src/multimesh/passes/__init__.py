"""The passes from a program to a plan, each a pure function."""
