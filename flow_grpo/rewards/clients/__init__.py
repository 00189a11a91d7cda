"""Clients of reward servers."""
