"""A file per model family."""
