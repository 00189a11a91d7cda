"""Experiments. A file of your own imports them: `from config import grpo`; see docs/howto/own_config.md."""
