"""Pictures of kernels and transfers in time: SVG, HTML and Perfetto."""
