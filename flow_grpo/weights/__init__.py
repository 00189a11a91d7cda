"""The transformer's weights: LoRA, sharding, quantised storage, moving averages."""
