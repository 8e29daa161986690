"""State on disk: `save`, `restore` and `verify`, in our format and in Orbax's."""
