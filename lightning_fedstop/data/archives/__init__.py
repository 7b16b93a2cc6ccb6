"""Archives of images on disk."""
