"""Builds the token caches that training reads."""
