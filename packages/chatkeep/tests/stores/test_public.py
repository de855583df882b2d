"""The public face: sorted, complete, light to import, clear about missing extras."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import chatkeep
from chatkeep.backends import open_persistence
from chatkeep.errors import CompositionError, MissingExtra


def test_every_public_name_is_there_and_documented() -> None:
    assert dir(chatkeep) == sorted(chatkeep.__all__)
    assert len(set(chatkeep.__all__)) == len(chatkeep.__all__)
    for name in chatkeep.__all__:
        value = getattr(chatkeep, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    source = ast.parse(Path(chatkeep.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in source.body if isinstance(node, ast.If))
    imported = {
        (node.module, alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    loaded = {(module, name) for module, names in chatkeep._HOMES.items() for name in names}
    assert imported == loaded
    assert {name for _, name in loaded} == set(chatkeep.__all__)


def test_every_public_name_is_in_the_list_of_its_module() -> None:
    for module, names in chatkeep._HOMES.items():
        assert set(names) <= set(importlib.import_module(module).__all__), module


def test_importing_chatkeep_loads_nothing_else_of_it() -> None:
    code = (
        "import sys, chatkeep\n"
        "heavy = {'pydantic', 'orjson', 'ag_ui', 'starlette', 'chatkeep_sql'}\n"
        "print([m for m in sys.modules if m in heavy or m.startswith('chatkeep.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = chatkeep.nonsense


def test_a_helper_whose_package_is_missing_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['chatkeep_sql'] = None\n"
        "import chatkeep\n"
        "try: chatkeep.sqlite_persistence\n"
        "except chatkeep.MissingExtra as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        'sqlite_persistence() needs an extra: pip install "chatkeep[sqlite]"'
    )


def test_a_url_opens_the_backend_of_its_scheme() -> None:
    assert open_persistence("memory://").backends[0].name == "memory"


@pytest.mark.parametrize(
    ("url", "extra"), [("mongodb://x", "mongo"), ("redis+cluster://x", "redis")]
)
def test_a_url_of_a_package_that_is_not_installed_names_the_extra(
    url: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [])
    with pytest.raises(MissingExtra, match=rf"chatkeep\[{extra}\]"):
        open_persistence(url)


@pytest.mark.parametrize(
    ("url", "what"),
    [(None, "NoneType"), ("chat.db", "a text without ://"), ("", "a text without ://")],
)
def test_what_is_no_url_is_told_what_one_looks_like(url: Any, what: str) -> None:
    """An environment variable that is not set is None."""
    with pytest.raises(CompositionError, match=rf"no backend for {what}: give a URL, like sqlite"):
        open_persistence(url)


def test_a_text_that_may_hold_a_password_is_not_repeated() -> None:
    with pytest.raises(CompositionError) as caught:
        open_persistence("user:secret@host/db")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["nonsense://x", "", "t.db", "memory://name", "memory:///x"])
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(CompositionError):
        open_persistence(url)
