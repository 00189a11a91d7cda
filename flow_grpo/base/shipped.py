"""What the package ships, by the relative path that the published configs name: found from any directory."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def find(path: str) -> str:
    """The path itself where it exists or nothing of that name is shipped, otherwise what is shipped."""
    shipped = (folder / path for folder in (PACKAGE.parent, PACKAGE / "assets"))
    return path if Path(path).exists() else str(next((place for place in shipped if place.exists()), path))
