"""Do once, in the process that warm.py forks, all that a run imports or works out, half of a short run's time."""

import gc

import evaluate  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import small
import tqdm
import wandb  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from flow_grpo.data import prompts

tqdm.tqdm.monitor_interval = 0  # else a thread, whose lock a fork might find closed
get_checkpoint_conversion_mapping("")  # compiles a thousand regular expressions
config = small.config_of("shapes_qwenimage")
model = small.MODELS["qwenimage"].without_weights(config.model)
for split in ("train", "validation", "test"):
    model.check_prompts(prompts.load_prompts(config.dataset, split), config.text_tokens)
gc.collect()
gc.freeze()  # as in conftest.py
