"""What a page of another origin must be allowed."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["CORS_OPTIONS"]

CORS_OPTIONS: Final[dict[str, Any]] = {
    "allow_methods": ["GET", "POST", "DELETE"],
    "allow_headers": ["content-type", "x-run-id", "last-event-id", "x-thread-seen"],
}
"""For Starlette's and FastAPI's ``CORSMiddleware``: the methods and headers that chat clients use.
The origins are yours to name::

    Middleware(CORSMiddleware, allow_origins=["https://app.example"], **CORS_OPTIONS)

Add headers of your own (a token) with ``CORS_OPTIONS | {"allow_headers": […]}``."""
