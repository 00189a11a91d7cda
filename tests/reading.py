"""Which settings a run reads, and inside which of its functions."""

import sys
from collections import defaultdict
from contextlib import contextmanager

from flow_grpo.settings import table
from flow_grpo.settings.sections import Config

ROLES = ("rollout", "add_gradients", "advantages", "updates")

MODULES = ("flow_grpo.run.rewards", "flow_grpo.run.update")  # of functions that several scripts share


@contextmanager
def recorded_reads(monkeypatch):
    """Yield {key: the roles inside which it is read}, which fills while the block trains; a key that is read elsewhere
    has "" among its roles. Settings that are read back from a run's folder do not count."""
    prefixes = {Config: ""}
    for name in table.SECTIONS:
        if name:
            prefixes[type(getattr(Config(), name))] = f"{name}."
    found = defaultdict(set)
    read_back = []

    def noting(section, name):
        value = object.__getattribute__(section, name)
        key = f"{prefixes.get(type(section), 'none.')}{name}"
        if key in table.BY_KEY and not any(section is other for other in read_back):
            role = _reader(sys._getframe(1))
            if role is not None:
                found[key].add(role)
        return value

    def of_stored(values, plain=table.of_stored):
        config = plain(values)
        read_back.extend([config, *(getattr(config, name) for name in table.SECTIONS if name)])
        return config

    with monkeypatch.context() as patch:
        patch.setattr(table, "of_stored", of_stored)
        for section in prefixes:
            patch.setattr(section, "__getattribute__", noting)
        yield found


def _reader(frame):
    """The function of a script inside which a frame lies, "" for none; None where the reader reads every setting."""
    # These modules check, copy or store them all.
    if frame.f_globals["__name__"].startswith(("flow_grpo.command_line", "flow_grpo.settings", "dataclasses")):
        return None
    while frame is not None:
        name = frame.f_code.co_name
        module = frame.f_globals["__name__"]
        if name in ROLES and (module.startswith("train_qwenimage") or module in MODULES):
            return name
        frame = frame.f_back
    return ""
