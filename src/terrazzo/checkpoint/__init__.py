"""The archive: reads and writes folders of tensors, and knows every dialect of names and words."""
