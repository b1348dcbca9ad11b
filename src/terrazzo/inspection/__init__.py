"""Says what is in a folder, which rule decided it and what will run it."""
