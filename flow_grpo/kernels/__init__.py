"""Kernels for speed and memory alone: any may be deleted, and the same numbers come slower."""
