"""What the GitHub workflows do: each of their steps is one line that calls a command of this package."""
