"""Plans and their timelines for people: text, SVG pictures, and traces. They read data; no data class needs them."""
