"""State on disk: `save`, `restore` and `verify`, in Orbax's format, with checksums of all files."""
