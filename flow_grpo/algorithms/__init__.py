"""What the papers say: losses, advantages, batches, and the records between rollout and update."""
