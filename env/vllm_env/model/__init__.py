"""A model's folder as it is found: the manifest of what was built for it, and the files that are the user's. It only reads."""
