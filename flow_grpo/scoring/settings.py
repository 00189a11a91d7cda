"""What config.reward says of each reward, checked before any model is loaded."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import httpx
import torch

from flow_grpo import rewards
from flow_grpo.quoting import quoted
from flow_grpo.settings import BY_KEY, check_value


class RewardSettings(NamedTuple):
    """The settings of one reward: keys of config.reward, each of which config.reward.args.NAME may override."""

    backend: str  # "inline", "thread" or "process"
    device: str  # "" = the rank's own
    batch_size: int  # images to a request
    in_flight: int  # requests to a server at once
    timeout_s: float
    retry_s: float
    on_failure: str  # "fail" or "mask"
    max_masked_share: float
    url: str  # of a server that runs; "" = none
    token: str
    image_format: str  # "npy" or "png"


def check_rewards(weights: Mapping[str, float], watched: Iterable[str], settings) -> None:
    """Raises ValueError for what cannot be meant, or a server that does not answer. Loads no model.

    Args:
        settings: config.reward.
    """
    args = settings.args.to_dict()
    for name, overrides in args.items():
        _check_args(f"config.reward.args.{name}", overrides)
    served = [name for name, overrides in args.items() if overrides.get("url") and not rewards.is_service(name)]
    rewards.check_rewards(weights, watched, served)
    for name in {**weights, **dict.fromkeys(watched)}:
        args.pop(name, None)
        reward, options = split_settings(name, settings)
        for key, value in reward._asdict().items():
            check_value(BY_KEY[f"reward.{key}"], value, f"reward.args.{name}.{key}")
        check_device(reward.device, f"config.reward.device of {name}")
        if name in served:
            _check_server(name, reward.url, options)
        else:
            rewards.check_options(name, options)
    if args:
        raise ValueError(
            f"config.reward.args.{next(iter(args))}: that reward is not in config.reward_fn or eval.rewards"
        )


def _check_args(key: str, overrides: Any) -> None:
    """That it is a dict, and can be written into config.json."""
    if not isinstance(overrides, dict):
        raise ValueError(f"{key} is {quoted(overrides)}; it must be a dict")
    try:
        json.dumps(overrides)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{key} is {quoted(overrides)}, which config.json cannot hold: {error}") from error


def check_device(name: str, key: str) -> None:
    """Raises ValueError, which names the setting by `key`, for a device that is not there; "" is the rank's own."""
    try:
        device = torch.device(name or "cpu")
    except RuntimeError as error:
        raise ValueError(f"{key} is {quoted(name)}, which names no device; write cpu or cuda:0") from error
    count = torch.cuda.device_count()
    if (device.index or 0) >= {"cpu": 1, "cuda": count}.get(device.type, 0):
        raise ValueError(f"{key} is {quoted(name)}, which is not there: there are the CPU and {count} CUDA devices")


def split_settings(name: str, settings) -> tuple[RewardSettings, dict[str, Any]]:
    """What config.reward says of a reward, and the options of its `load`."""
    keys, overrides = RewardSettings._fields, settings.args.get(name, {})
    reward = RewardSettings(*(overrides.get(key, settings.get(key)) for key in keys))
    options = {key: value for key, value in overrides.items() if key not in keys}
    if rewards.is_service(name):  # it has a server of its own kind, and a request per image
        options |= {key: getattr(reward, key) for key in rewards.CONNECTION}
        options |= {"url": overrides["url"]} if "url" in overrides else {}
        reward = reward._replace(url="", batch_size=overrides.get("batch_size", 1))
    return reward, options


def _check_server(name: str, url: str, options: dict[str, Any]) -> None:
    key = f"config.reward.args.{name}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{key}.url is {url!r}; it begins with http:// or https://")
    if options:
        raise ValueError(f"{key}: {', '.join(options)} unknown, or for the server to know")
    try:
        httpx.get(url.rstrip("/") + "/health", timeout=10, trust_env=False)
    except httpx.HTTPError as error:
        raise ValueError(f"{key}: no answer from {url}: {error}") from error
