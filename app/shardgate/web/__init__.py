"""Pages for people: the start page, datasets, previews, links to viewers, and signing in."""
