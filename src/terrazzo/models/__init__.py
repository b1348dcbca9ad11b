"""Models: one decoder, a table of architectures, and the loader that fills it."""
