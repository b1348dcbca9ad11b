"""The interpreter: what other engines make of a checkpoint, and how to write one they load."""
