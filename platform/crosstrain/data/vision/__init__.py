"""Images, conversations about them, and their annotations."""
