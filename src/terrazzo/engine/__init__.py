"""The serving hall: requests become steps, steps become tokens, tokens become text."""
