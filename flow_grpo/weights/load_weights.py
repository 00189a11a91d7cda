"""A model's transformer, laid out over the ranks, quantised, and filled."""

from pathlib import Path

from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.settings.sections import Config, Lora
from flow_grpo.weights import base_lora, fsdp_utils, lora_files, model_files, modulation, policies, quantisation
from flow_grpo.weights.safetensors_reader import StoredWeights


def check_model(model: str, lora: Lora, family: type[FlowModel]) -> None:
    """Raise UserError, before any weight is loaded, for a model whose parts are missing, and for an adapter that
    cannot be used. `model_files.check_weights` checks a model's files of weights."""
    model_files.check_parts(model, family)
    if lora.targets or lora.path or lora.base:
        transformer = family.empty_transformer(model)
        if lora.base:
            base_lora.check(lora.base, transformer, family, model)
        policies.check_targets(lora, transformer, family)
        adapter = policies.check_lora(lora)
        if adapter is not None:
            lora_files.check_fits(lora.path, adapter.shapes, transformer, model)
            lora_files.check_trained(lora.path, adapter, policies.targets(lora, family))


def fill_model(
    config: Config,
    model: FlowModel,
    mesh: fsdp_utils.DeviceMesh | None = None,
    *,
    weights: Path | None = None,
    init: fsdp_utils.AdapterInit | None = None,
) -> None:
    """Fill a transformer on the meta device, after its layers are quantised.

    Args:
        weights: folder of everything but adapters, which config.lora.base has been added to where there is one; None =
            the model's own.
        init: the adapter's first weights; None = by config.lora.
    """
    model.batches_guidance = config.batched_guidance
    stored = _stored_weights(config, model) if weights is None else StoredWeights(weights)
    quantisation.quantise_units(model.transformer, model.SHARD_UNITS, config.base_precision)
    if config.train.grad_input_precision == "fp8":
        quantisation.round_gradients(model.transformer)
    if config.precompute_modulation:
        stored = modulation.precompute(config, model, stored)
    fsdp_utils.prepare(
        model.network,
        mesh,
        units=model.SHARD_UNITS,
        device=model.device,
        precision=config.precision,
        weights=stored,
        init=init or policies.adapter_init(config.lora, config.seed),
        offload=mesh is not None and config.fsdp.offload == "weights",
    )


def _stored_weights(config: Config, model: FlowModel) -> StoredWeights | None:
    """Return the model's own weights, with those of config.lora.base; None for a model that comes with its weights."""
    if not model.ON_DISK:
        return None
    folder = model.transformer_folder(config.model)
    if not config.lora.base:
        return StoredWeights(folder)
    return StoredWeights(folder, base_lora.read(config.lora.base, type(model)))
