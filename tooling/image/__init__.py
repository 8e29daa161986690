"""Images: the request, the engine that builds, the build, its check, and the way to a registry."""
