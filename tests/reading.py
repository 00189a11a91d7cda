"""Which settings a run reads, and inside which of its functions."""

import sys
from collections import defaultdict
from contextlib import contextmanager

from ml_collections import ConfigDict

from flow_grpo.settings import table

ROLES = ("rollout", "add_gradients", "advantages")
OF_ONE = ("__getattr__", "get")  # functions of ml_collections that read one setting, where others read all of a section


@contextmanager
def recorded_reads(config, monkeypatch):
    """Yields {key: the roles inside which it is read}, which fills while the block trains this config; a key that is
    read elsewhere has "" among its roles."""
    prefixes = {id(config): ""} | {id(config[section]): f"{section}." for section in table.SECTIONS if section}
    found, plain = defaultdict(set), ConfigDict.__getitem__

    def noting(self, key):
        value = plain(self, key)
        prefix = prefixes.get(id(self))
        if prefix is not None and f"{prefix}{key}" in table.BY_KEY:
            role = _reader(sys._getframe(1))
            if role is not None:
                found[f"{prefix}{key}"].add(role)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(ConfigDict, "__getitem__", noting)
        yield found


def _reader(frame):
    """The function of a script inside which a frame lies, "" for none; None where the reader reads every setting."""
    while frame.f_globals["__name__"].startswith("ml_collections"):
        if frame.f_code.co_name not in OF_ONE:
            return None
        frame = frame.f_back
    if frame.f_globals["__name__"].startswith(
        ("flow_grpo.command_line", "flow_grpo.settings")
    ):  # it checks or stores them all
        return None
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals["__name__"]
        if name in ROLES and (module.startswith("train_qwenimage") or module == "flow_grpo.run.rewards"):
            return name
        frame = frame.f_back
    return ""
