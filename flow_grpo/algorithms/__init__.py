"""Algorithms: losses, advantages, the plan of an epoch, and the records between rollout and update."""
