"""Trainer tensors to Hugging Face names, byte for byte."""
