"""The workshop: Hugging Face models become GPTQ checkpoints, layer by layer."""
