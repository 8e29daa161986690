"""What every command leans on: errors, programs, files, the terminal."""
