"""DiffusionNFT on FLUX.1: train_qwenimage_nft.py with another model.

torchrun --nproc_per_node=8 scripts/train_flux_nft.py --config config/nft.py:pickscore_flux_nft
"""

from flow_grpo.command_line import checks, command_line

if __name__ == "__main__":
    config = command_line.parse("config/nft.py:pickscore_flux_nft", checks.NFT)  # before torch is imported
    import train_qwenimage_nft

    command_line.run(train_qwenimage_nft.main, config)
