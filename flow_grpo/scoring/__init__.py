"""Rewards scored while images are still being made: in a thread, in a process of their own, or by a server."""
