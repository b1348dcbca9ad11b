"""Importing: brings models of other formats in as Hugging Face folders."""
