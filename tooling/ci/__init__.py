"""The steps of the GitHub workflows. Each is one line there, which calls a command of this package."""
