"""Metadata for a package index: REPOSITORY_URL, where set, makes links absolute."""

import os
import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text("utf-8")
PAGES = {
    "Documentation": "docs/tour.md",
    "Changelog": "CHANGELOG.md",
    "Results": "results/README.md",
}


def metadata(readme: str, url: str) -> dict:
    """Return the long description and the addresses; relative links without a ``url``."""
    if not url:
        return {"long_description": readme}
    pages = {name: f"{url}/blob/main/{path}" for name, path in PAGES.items()}
    # an image is shown from its raw file, everything else on its page
    readme = re.sub(r"(!\[[^\]]*\]\()(?!https?:)([^)#]+)", rf"\1{url}/raw/main/\2", readme)
    readme = re.sub(r"(?<=\]\()(?!https?:|#)", f"{url}/blob/main/", readme)
    return {"long_description": readme, "url": url, "project_urls": {"Source": url, **pages}}


if __name__ == "__main__":
    setup(**metadata(README, os.environ.get("REPOSITORY_URL", "").rstrip("/")))
