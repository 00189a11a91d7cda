"""Diffusers pipelines that also return the log-probability of the steps they took."""
