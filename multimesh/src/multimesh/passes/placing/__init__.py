"""The submesh of every operation."""
