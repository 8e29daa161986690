"""Images: what to build, the engine that builds, the build, its check, and the way to a registry."""
