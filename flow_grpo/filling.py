"""A model's transformer, laid out over the ranks, quantised, and filled."""

from ml_collections import ConfigDict

from flow_grpo import fsdp_utils, policies, quantised, quantised_files
from flow_grpo.diffusers_patch.flow_model import FlowModel


def check(config: ConfigDict) -> None:
    """Raises ValueError, before any weight is loaded, for an adapter or a cache that cannot be used."""
    policies.check_lora(config.lora)
    if config.weights_cache:
        quantised_files.check_writable(config.weights_cache)


def fill(config: ConfigDict, model: FlowModel, mesh: fsdp_utils.DeviceMesh | None = None) -> None:
    """Adapters by config.lora; quantised layers from config.weights_cache, where they are in it; everything else from
    the model's folder. What the cache lacked is written into it.

    Args:
        model: its transformer on the meta device, adapters attached.
        mesh: from `fsdp_utils.make_mesh`; None = no shards.
    """
    transformer, precision = model.transformer, config.base_precision
    weights = model.transformer_folder(config.model)
    quantised.quantise_units(transformer, model.SHARD_UNITS, precision)
    cache = quantised_files.folder_of(config.weights_cache, weights, precision) if config.weights_cache else None
    cached = cache and quantised_files.fill(transformer, cache, model.device)
    fsdp_utils.prepare(
        transformer,
        mesh,
        units=model.SHARD_UNITS,
        device=model.device,
        precision=config.precision,
        weights=weights,
        init=policies.adapter_init(config.lora, config.seed),
        offload=mesh is not None and config.fsdp.offload_weights,
    )
    if cache and not cached:
        quantised_files.keep(transformer, cache)
