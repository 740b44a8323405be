"""Pages for people: the start page, and links to viewers."""
