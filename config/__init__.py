"""The experiments. A file of your own imports them: `from config import grpo`; see docs/own_config.md."""
