"""Kernels: one prepared weight times activations, on one device, into a given output."""
