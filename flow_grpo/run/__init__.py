"""A training run: its state, start, rollout, update, evaluation, saving and end."""
