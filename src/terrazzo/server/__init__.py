"""Speaks HTTP for the engine, as OpenAI clients expect it."""
