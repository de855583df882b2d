"""The five stores over a backend's primitives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatkeep._bag import Stores

if TYPE_CHECKING:
    from chatkeep.backends import Backend


def build_stores(backend: Backend) -> Stores:
    """The stores of ``backend``."""
    return Stores()
