"""When what ran, as pictures: SVG, HTML and Perfetto."""
