"""What config.reward says of each reward, checked before any model is loaded."""

from collections import namedtuple
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.rewards.clients.client import Server, ServerError, read_token, urls_of
from flow_grpo.rewards.scores import check_device
from flow_grpo.settings import stored_config
from flow_grpo.settings.table import BY_KEY, TOKEN_WAYS

KEYS = [key.removeprefix("reward.") for key in BY_KEY if key.startswith("reward.") and key != "reward.args"]
RewardSettings = namedtuple("RewardSettings", ["url", *KEYS])  # of one reward: its server, and what args may override
HEALTH_S = 10.0  # for which a server's answer to GET /health is waited for


def check_rewards(weights: Mapping[str, float], watched: Iterable[str], settings) -> None:
    """Raises UserError for what config.reward cannot mean, or a server that does not answer. Loads no model."""
    args = settings.args.to_dict()
    for name, overrides in args.items():
        if not isinstance(overrides, dict):
            raise UserError(f"config.reward.args.{name} is {quoted(overrides)}; it must be a dict")
    served = [name for name, overrides in args.items() if overrides.get("url") and not rewards.is_service(name)]
    rewards.check_rewards(weights, watched, served)
    for name in {**weights, **dict.fromkeys(watched)}:
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


def split_settings(name: str, settings) -> tuple[RewardSettings, dict[str, Any]]:
    """What config.reward says of a reward, and the options of its `load`."""
    overrides = settings.args.get(name, {})
    reward = RewardSettings(overrides.get("url", ""), *(overrides.get(key, settings.get(key)) for key in KEYS))
    options = {key: value for key, value in overrides.items() if key not in RewardSettings._fields}
    if rewards.is_service(name):  # it has a server of its own kind, and a request per image
        options |= {key: getattr(reward, key) for key in rewards.CONNECTION}
        options |= {"url": overrides["url"]} if "url" in overrides else {}
        reward = reward._replace(url="", batch_size=overrides.get("batch_size", 1))
    return reward, options


def _check_connection(name: str, reward: RewardSettings, options: dict[str, Any]) -> None:
    for key in KEYS:
        BY_KEY[f"reward.{key}"].check(getattr(reward, key), f"reward.args.{name}.{key}")
    check_device(reward.device, f"config.reward.device of {name}")
    read_token(reward.token_file)
    for key in options.keys() - {"url"}:
        if answer := stored_config.MOVED.get(f"reward.{key}"):
            raise UserError(f"config.reward.args.{name}.{key} is now {answer}")
    if "url" in options:  # of a server of another kind
        check_urls(f"config.reward.args.{name}.url", options["url"])


def check_urls(key: str, urls: str | list[str]) -> None:
    """Raises UserError unless it is a server's address, or a list of such, without a password: the config is stored."""
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
    check_urls(f"{key}.url", reward.url)
    if options:
        raise UserError(f"{key}: {', '.join(options)} unknown, or for the server to know")
    server = Server(reward.url, reward.token_file, HEALTH_S)
    for url in server.urls:
        try:
            answer = server.health(url)
        except ServerError as error:
            raise UserError(f"{key}: {error}") from error
        if b'"allowed":false' in answer:
            raise UserError(f"{key}: {url} asks for another token; {TOKEN_WAYS}")
