"""Scopes match exactly, and an id is refused, never repaired."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkeep import memory_persistence
from chatkeep.backends import Persistence, Stores
from chatkeep.errors import CompositionError, InvalidValue
from chatkeep.scope import EMPTY_SCOPE, MAX_ID_BYTES, Scope, check_id, key_digest


@pytest.mark.parametrize("value", ["a", "subagent:x", "a/b{c}*:d e", "😀" * 256, "a" * 1024, "ñ"])
def test_any_text_of_up_to_1024_bytes_may_be_an_id(value: str) -> None:
    assert check_id(value, "thread_id") is value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "not be empty"),
        ("a\x00", "NUL"),
        ("\ud800", "surrogate"),
        ("a" * (MAX_ID_BYTES + 1), "1024"),
        ("😀" * 257, "1028"),
        (7, "int"),
        (None, "NoneType"),
    ],
)
def test_what_may_be_no_id_is_refused_by_name(value: Any, why: str) -> None:
    with pytest.raises(InvalidValue, match=why) as caught:
        check_id(value, "thread_id")
    assert caught.value.path == "thread_id"


def test_an_empty_text_in_a_scope_is_refused_and_absence_is_the_empty_scope() -> None:
    with pytest.raises(InvalidValue, match=r"scope\.tenant_id"):
        Scope(tenant_id="")
    assert Scope() == EMPTY_SCOPE
    assert EMPTY_SCOPE.key == ("", "")


@pytest.mark.parametrize("wrong", ["ada", None, {"user_id": "ada"}, ("a", "b"), Scope])
def test_a_view_of_something_that_is_no_scope_is_refused(wrong: Any) -> None:
    """A bag, a backend and a bag without backends say so at once, not at the first query."""
    bag = memory_persistence()
    bare = Persistence(Stores())
    for owner in (bag, bag.backends[0], bare):
        with pytest.raises(CompositionError, match="a scope is a Scope"):
            owner.scoped(wrong)


ids = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1)


@given(st.none() | ids, st.none() | ids)
def test_a_scope_comes_back_from_its_key(tenant: str | None, user: str | None) -> None:
    scope = Scope(tenant_id=tenant, user_id=user)
    assert Scope.from_key(*scope.key) == scope


def test_a_tenant_and_a_user_of_the_same_name_are_two_scopes() -> None:
    assert Scope(tenant_id="a").key != Scope(user_id="a").key


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4), st.data())
def test_no_two_compound_keys_share_a_digest(parts: list[str], data: st.DataObject) -> None:
    other = data.draw(st.lists(st.sampled_from([*parts, "", "a", "".join(parts)]), max_size=4))
    assert (key_digest(*parts) == key_digest(*other)) == (parts == other)
