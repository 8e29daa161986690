"""Build-and-release tooling: pinned sources, images, releases."""
