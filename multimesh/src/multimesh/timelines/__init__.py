"""Pictures of what ran when: SVG, HTML and Perfetto."""
