"""DiffusionNFT on FLUX.1: train_qwenimage_nft.py with another model.

torchrun --nproc_per_node=8 scripts/train_flux_nft.py --config config/nft.py:pickscore_flux_nft
"""

import train_qwenimage_nft

from flow_grpo import command_line
from flow_grpo.diffusers_patch import flux_pipeline_with_logprob as flux

if __name__ == "__main__":
    command_line.run(lambda config: train_qwenimage_nft.main(config, flux), "config/nft.py:pickscore_flux_nft")
