"""Kernels of NVIDIA cards: a family of matrix products over one layout, and what stands between."""
