"""Rewards scored while images are still being made: in a thread, or by a server."""
