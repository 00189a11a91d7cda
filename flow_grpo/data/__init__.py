"""Prompts, preference pairs and their embeddings."""
