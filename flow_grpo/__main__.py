"""Run a script of flow_grpo by its name, wherever the package is installed.

    python -m flow_grpo train_qwenimage_nft --config config/nft.py:shapes_qwenimage_nft
    torchrun --nproc_per_node=8 -m flow_grpo train_qwenimage_pr --config config/grpo.py:pickscore_qwenimage_pr
    flow-grpo evaluate --help

The scripts, some tools, the configs and the small data sets of a checkout come with the package. What follows the name
is the script's own.
"""

import difflib
import runpy
import sys

from flow_grpo import __version__
from flow_grpo.base import locations


def main() -> None:
    """Run the script that the command line names, as if it had been started by its path."""
    name = sys.argv[1].removesuffix(".py") if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return
    if name == "--version":
        print(__version__)
        return
    commands = locations.commands()
    if name not in commands:
        nearest = difflib.get_close_matches(name, commands, cutoff=0)
        sys.exit(f"flow_grpo has no script {name!r}; nearest: {', '.join(nearest)}; --help lists all")
    path = commands[name]
    # As Python does for a script that is started by its path: scripts import each other.
    sys.argv = [str(path), *sys.argv[2:]]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def usage() -> str:
    """The text of --help: the examples above, then a line for each script with the first line of its docstring."""
    lines = [__doc__ or "", "scripts:"]
    for name, path in locations.commands().items():
        docstring = path.read_text(encoding="utf-8").removeprefix('"""')
        lines.append(f"  {name:<26} {docstring.splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
