"""Llama-style language models trained from scratch in JAX."""
