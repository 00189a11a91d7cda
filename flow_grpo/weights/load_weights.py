"""A model's transformer, laid out over the ranks, quantised, and filled."""

from pathlib import Path

from ml_collections import ConfigDict

from flow_grpo.base import folders
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.weights import fsdp_utils, lora_files, policies, quantisation, quantised_cache


def check(config: ConfigDict, family: type[FlowModel]) -> None:
    """Raises UserError, before any weight is loaded, for an adapter or a cache that cannot be used."""
    if adapter := policies.check_lora(config.lora):
        lora_files.check_fits(config.lora.path, adapter, family.empty_transformer(config.model), config.model)
        lora_files.check_targets(config.lora.path, adapter, family.LORA_TARGETS)
    if config.cache_dir:
        folders.make(Path(config.cache_dir), "config.cache_dir")


def fill(config: ConfigDict, model: FlowModel, mesh: fsdp_utils.DeviceMesh | None = None) -> None:
    """Adapters by config.lora; quantised layers from config.cache_dir, where they are in it; everything else from
    the model's folder. What the cache lacked is written into it.

    Args:
        model: its transformer on the meta device, adapters attached.
        mesh: from `fsdp_utils.make_mesh`; None = no shards.
    """
    transformer, precision = model.transformer, config.base_precision
    weights = model.transformer_folder(config.model)
    quantisation.quantise_units(transformer, model.SHARD_UNITS, precision)
    cache, cached = None, False
    if config.cache_dir and precision and weights:
        cache = quantised_cache.folder_of(config.cache_dir, weights, precision, model.device)
        if cached := quantised_cache.on_all_ranks(cache):
            quantised_cache.fill(transformer, cache, model.device)
    fsdp_utils.prepare(
        model.network,
        mesh,
        units=model.SHARD_UNITS,
        device=model.device,
        precision=config.precision,
        weights=weights,
        init=policies.adapter_init(config.lora, config.seed),
        offload=mesh is not None and config.fsdp.offload == "weights",
    )
    if cache and not cached:
        quantised_cache.keep(transformer, cache)
