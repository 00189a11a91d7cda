"""Scores of fixed prompts and noises, their errors, and the policies that are compared."""
