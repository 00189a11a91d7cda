"""What the papers say: losses, advantages, windows, batches, and the records between rollout and update."""
