"""The settings of each reward in config.reward, checked before any model is loaded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import httpx

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.rewards.clients.client import Server, ServerError, read_token, urls_of
from flow_grpo.rewards.scores import check_device
from flow_grpo.settings import stored_config
from flow_grpo.settings.sections import Reward
from flow_grpo.settings.setting import plain
from flow_grpo.settings.table import BY_KEY, TOKEN_WAYS

KEYS = [field.name for field in fields(Reward) if field.name != "args"]
HEALTH_S = 10.0  # for which a server's answer to GET /health is waited for


@dataclass(frozen=True)
class RewardSettings(Reward):
    """Settings of one reward: those of config.reward, or what `args` say of it in their place."""

    url: str | list[str] = ""  # of the server that scores it; "" = none


def check_rewards(weights: Mapping[str, float], watched: Iterable[str], settings: Reward) -> None:
    """Raise UserError for settings of config.reward that cannot be meant, or a server that does not answer. Loads no
    model."""
    args = plain(settings.args)
    served = rewards.served(args)
    rewards.check_rewards(weights, watched, served)
    for name in dict.fromkeys([*weights, *watched]):
        args.pop(name, None)
        reward, options = split_settings(name, settings)
        _check_connection(name, reward, options)
        if name in served:
            _check_server(f"config.reward.args.{name}", reward, options)
        else:
            rewards.check_options(name, options)
    if args:
        raise UserError(
            f"config.reward.args.{next(iter(args))}: that reward is not in config.reward_fn or eval.rewards"
        )


def check_gradients(weights: Mapping[str, float], settings: Reward) -> None:
    """Raise UserError for a reward without a gradient, or one that a server scores. Loads no model."""
    served = [name for name in weights if split_settings(name, settings)[0].url]
    rewards.check_gradients(weights, served)


def split_settings(name: str, settings: Reward) -> tuple[RewardSettings, dict[str, Any]]:
    """Return the settings of a reward, and the options of its `load`."""
    overrides = plain(settings.args.get(name, {}))
    values = {key: overrides.get(key, getattr(settings, key)) for key in KEYS}
    reward = RewardSettings(url=overrides.get("url", ""), **values)
    options = {key: value for key, value in overrides.items() if key not in ("url", *KEYS)}
    # A service has a server of its own kind, which its file asks, with a request per image.
    if rewards.is_service(name):
        for key in rewards.CONNECTION:
            options[key] = getattr(reward, key)
        if "url" in overrides:
            options["url"] = overrides["url"]
        reward = replace(reward, url="", batch_size=overrides.get("batch_size", 1))
    return reward, options


def _check_connection(name: str, reward: RewardSettings, options: dict[str, Any]) -> None:
    """Raise UserError for a setting of a reward or of its server that cannot be meant. Asks no server."""
    for key in KEYS:
        BY_KEY[f"reward.{key}"].check(getattr(reward, key), f"reward.args.{name}.{key}")
    check_device(reward.device, f"config.reward.device of {name}")
    read_token(reward.token_file)
    for key in options.keys() - {"url"}:
        new_name = stored_config.MOVED.get(f"reward.{key}")
        if new_name:
            raise UserError(f"config.reward.args.{name}.{key} is now {new_name}")
    # The server of a service.
    if "url" in options:
        check_urls(f"config.reward.args.{name}.url", options["url"])


def check_urls(key: str, urls: str | list[str]) -> None:
    """Raise UserError unless a setting is a server's address, or a list of such, without a password: configs are
    stored."""
    if not urls_of(urls):
        raise UserError(f"{key} is an empty list")
    for url in urls_of(urls):
        try:
            parts = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise UserError(f"{key} is {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.host:
            raise UserError(f"{key} is {url!r}; it begins with http:// or https://")
        if parts.userinfo or parts.query:
            raise UserError(f"{key} holds a password or a query, which would be stored; {TOKEN_WAYS}")


def _check_server(key: str, reward: RewardSettings, options: dict[str, Any]) -> None:
    """Raise UserError for a server of ours that does not answer, refuses the token, or gets options of the reward."""
    check_urls(f"{key}.url", reward.url)
    if options:
        raise UserError(
            f"{key}: no setting is called {', '.join(options)}; options of the reward itself are given to its server"
        )
    server = Server(reward.url, reward.token_file, HEALTH_S)
    for url in server.urls:
        try:
            answer = server.health(url)
        except ServerError as error:
            raise UserError(f"{key}: {error}") from error
        if b'"allowed":false' in answer:
            raise UserError(f"{key}: {url} asks for another token; {TOKEN_WAYS}")
