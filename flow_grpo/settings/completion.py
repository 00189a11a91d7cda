"""Which words a shell may offer on a script's command line; assets/completion.sh asks for them."""

from collections.abc import Sequence

from flow_grpo import rewards
from flow_grpo.base import shipped
from flow_grpo.settings import config_files, table

FLAGS = "--config", "--config.", "--dry_run", "--help", "--list"


def answer(words: Sequence[str]) -> str | None:
    """What --completion and --complete WORD... print: the shell's part, or a line for each word that may be the last
    one; None for another command line."""
    if list(words) == ["--completion"]:
        return (shipped.PACKAGE / "assets" / "completion.sh").read_text()
    return "\n".join(_offers(words[1:])) if list(words[:1]) == ["--complete"] else None


def _offers(words: Sequence[str]) -> list[str]:
    """Args: words: of the command line so far; the last one may be "" or begun."""
    begun, before = words[-1], [*words[-2:-1], ""][0]
    if before == "--config":
        offers = _runs(begun)
    elif begun.startswith("--config="):
        offers = [f"--config={run}" for run in _runs(begun.removeprefix("--config="))]
    elif "--help" in words[:-1]:
        offers = [*filter(None, table.SECTIONS), *table.BY_KEY]
    elif "=" in begun:
        offers = _values(begun.partition("=")[0])
    elif begun.startswith("--config."):
        names = rewards.offered() if begun.startswith("--config.reward") else ()
        offers = [f"--config.{key}=" for key in (*table.BY_KEY, *(f"reward_fn.{name}" for name in names))]
        offers += [f"--config.reward.args.{name}." for name in names]
    else:
        offers = FLAGS
    return [offer for offer in offers if offer.startswith(begun)]


def _runs(begun: str) -> list[str]:
    """FILE: without a colon, else FILE:NAME or FILE:NAME,VARIANT."""
    file, colon, names = begun.partition(":")
    if not colon:
        return [f"config/{path.name}:" for path in sorted((config_files.CHECKOUT / "config").glob("[!_]*.py"))]
    module, (*chosen, _) = config_files.module_of(config_files.find(file)), names.split(",")
    functions = getattr(module, "VARIANTS" if chosen else "RUNS", ())
    return [":".join((file, ",".join((*chosen, f.__name__)))) for f in functions if f.__name__ not in chosen]


def _values(flag: str) -> list[str]:
    setting = table.BY_KEY.get(flag.removeprefix("--config."))
    choices = ("True", "False") if setting and isinstance(setting.default, bool) else setting.choices if setting else ()
    return [f"{flag}={choice}" for choice in choices]
