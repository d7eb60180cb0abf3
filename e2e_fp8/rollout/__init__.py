"""vLLM in the trainer's process: serves the FP8 bytes it is handed, and shows them on request."""
