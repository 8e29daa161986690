"""Addresses in the metadata of a wheel: a release knows where its documentation is, a clone does not."""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Addresses(MetadataHookInterface):
    """Takes the site's address from ``DOCUMENTATION_URL`` in the environment."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Name the site, if it is known."""
        site = os.environ.get("DOCUMENTATION_URL")
        metadata["urls"] = {"Documentation": site} if site else {}
