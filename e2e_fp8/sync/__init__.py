"""Transport and proof of weight bytes; knows names and bytes, not models."""
