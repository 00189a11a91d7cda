"""Speed and memory alone: any of these may be deleted, and the same numbers come slower."""
