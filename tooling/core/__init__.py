"""Modules that every command leans on: errors, programs, files, the terminal."""
