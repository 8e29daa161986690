"""The groups of components and packages."""

GROUPS = ("run", "source", "dev")
CUDA = ("cuda12", "cuda13")  # only where asked for: packages of 5 GB, for GPUs
ALL_GROUPS = (*GROUPS, "image", *CUDA, "data")  # data, too, is 2 GB; image is what building an image needs
