"""Small state: the metadata store and its compare-and-set tier."""

from __future__ import annotations

from typing import Any

import pytest

from chatkeep.errors import InvalidValue
from chatkeep.stores import MetadataStore, VersionedMetadata
from chatkeep.testkit.conformance._base import ConformanceCase, Ids, exact, gather

__all__ = ["TestMetadata", "TestVersionedMetadata"]

_VALUES: dict[str, Any] = {
    "false": False,
    "true": True,
    "zero": 0,
    "one": 1,
    "one as float": 1.0,
    "empty text": "",
    "empty list": [],
    "empty object": {},
    "text": "é😀\x00",
    "big": 2**53 + 1,
    "huge": -(10**40),
    "small": 1e-200,
    "minus zero": -0.0,
    "deep": {"b": [{"a.b": None, "$x": {"": [1, 1.0, True]}}], "a": 1},
}


class TestMetadata(ConformanceCase):
    """The metadata store: D1, and what upstream does not ask."""

    async def test_d1_absent_is_none(self, metadata: MetadataStore, ids: Ids) -> None:
        """A pair that was never set answers None."""
        assert await metadata.get(ids("n"), "k") is None

    async def test_d1_a_value_is_set_read_and_overwritten(
        self, metadata: MetadataStore, ids: Ids
    ) -> None:
        """Set is an upsert."""
        name = ids("n")
        await metadata.set(name, "k", {"a": 1})
        assert await metadata.get(name, "k") == {"a": 1}
        await metadata.set(name, "k", [2])
        assert await metadata.get(name, "k") == [2]

    async def test_d1_namespaces_are_apart(self, metadata: MetadataStore, ids: Ids) -> None:
        """The same key in two namespaces is two values; delete takes one."""
        one, two, key = ids("n"), ids("n"), ids("k")
        await metadata.set(one, key, 1)
        await metadata.set(two, key, 2)
        await metadata.set(one, f"{key}x", 3)
        assert (await metadata.get(one, key), await metadata.get(two, key)) == (1, 2)
        await metadata.delete(one, key)
        assert await metadata.get(one, key) is None
        assert await metadata.get(two, key) == 2
        assert await metadata.get(one, f"{key}x") == 3

    async def test_d1_delete_of_an_absent_pair_is_a_no_op(
        self, metadata: MetadataStore, ids: Ids
    ) -> None:
        """Deleting twice, or what never was, raises nothing."""
        name = ids("n")
        await metadata.delete(name, "k")
        await metadata.set(name, "k", 1)
        await metadata.delete(name, "k")
        await metadata.delete(name, "k")
        assert await metadata.get(name, "k") is None

    async def test_d1_namespace_and_key_are_never_joined(
        self, metadata: MetadataStore, ids: Ids
    ) -> None:
        """The pair is the identity: ("a:b", "c") is not ("a", "b:c"), whatever the separator."""
        tag = ids("a")
        pairs = [
            pair
            for mark in ":#/|\x1f\n,.%\\"
            for pair in ((f"{tag}{mark}b", "c"), (tag, f"b{mark}c"), (f"{tag}{mark}", f"b{mark}"))
        ]
        for n, (name, key) in enumerate(pairs):
            await metadata.set(name, key, n)
        for n, (name, key) in enumerate(pairs):
            assert await metadata.get(name, key) == n, (name, key)
        await metadata.delete(*pairs[0])
        for n, (name, key) in enumerate(pairs[1:], 1):
            assert await metadata.get(name, key) == n, (name, key)

    async def test_odd_keys_are_only_text(self, metadata: MetadataStore, ids: Ids) -> None:
        """Keys with wildcards, quotes, dots, dollars or SQL in them; the empty key too."""
        name = ids("n")
        keys = [
            "",
            " ",
            "a.b",
            "$where",
            "x') OR 1=1 --",
            "%",
            "_",
            "*",
            "?",
            "[a-z]",
            "a",
            "A",
            "é",
            "e\u0301",
            "😀",
            "{}",
            "k" * 1024,
        ]
        for n, key in enumerate(keys):
            await metadata.set(name, key, n)
        for n, key in enumerate(keys):
            assert await metadata.get(name, key) == n, key
        await metadata.delete(name, "%")
        await metadata.delete(name, "*")
        left = [key for key in keys if key not in ("%", "*")]
        assert [await metadata.get(name, key) for key in left] == [keys.index(k) for k in left]

    @pytest.mark.parametrize("kind", _VALUES)
    async def test_values_round_trip_exactly(
        self, metadata: MetadataStore, ids: Ids, kind: str
    ) -> None:
        """Value, type and key order come back; empty and false values are not absent."""
        name = ids("n")
        await metadata.set(name, "k", _VALUES[kind])
        assert exact(await metadata.get(name, "k")) == exact(_VALUES[kind])

    async def test_null_is_refused(self, metadata: MetadataStore, ids: Ids) -> None:
        """A stored null could not be told from absence; what was set stays."""
        name = ids("n")
        with pytest.raises(InvalidValue):
            await metadata.set(name, "k", None)
        await metadata.set(name, "k", 1)
        with pytest.raises(InvalidValue):
            await metadata.set(name, "k", None)
        assert await metadata.get(name, "k") == 1

    async def test_a_value_that_cannot_be_stored_changes_nothing(
        self, metadata: MetadataStore, ids: Ids
    ) -> None:
        """InvalidValue names the path and leaves the old value."""
        name = ids("n")
        await metadata.set(name, "k", 1)
        with pytest.raises(InvalidValue) as caught:
            await metadata.set(name, "k", {"a": [0, float("nan")]})
        assert "a[1]" in caught.value.path
        assert await metadata.get(name, "k") == 1

    async def test_a_large_value_round_trips(self, metadata: MetadataStore, ids: Ids) -> None:
        """A megabyte and a half of text is one value."""
        name = ids("n")
        value = {"text": "é" * 750_000}
        await metadata.set(name, "k", value)
        assert await metadata.get(name, "k") == value

    async def test_changing_what_was_passed_or_returned_changes_nothing_stored(
        self, metadata: MetadataStore, ids: Ids
    ) -> None:
        """Copy semantics on the way in and on the way out."""
        name = ids("n")
        value: dict[str, Any] = {"deep": [1]}
        await metadata.set(name, "k", value)
        value["deep"].append(2)
        found: Any = await metadata.get(name, "k")
        assert found == {"deep": [1]}
        found["deep"].append(3)
        assert await metadata.get(name, "k") == {"deep": [1]}

    @pytest.mark.parametrize("bad", ["", "a\x00b", "\ud800", "x" * 1025])
    async def test_a_namespace_that_is_none_is_refused(
        self, metadata: MetadataStore, bad: str
    ) -> None:
        """Namespaces follow the rules of ids; keys too, but may be empty."""
        with pytest.raises(InvalidValue):
            await metadata.get(bad, "k")
        with pytest.raises(InvalidValue):
            await metadata.set(bad, "k", 1)
        if bad:
            with pytest.raises(InvalidValue):
                await metadata.set("n", bad, 1)

    async def test_concurrent_first_sets_leave_one_value(
        self, metadata: MetadataStore, ids: Ids
    ) -> None:
        """Racing upserts raise nothing; one value stands."""
        name = ids("n")
        await gather([metadata.set(name, "k", n) for n in range(10)])
        assert await metadata.get(name, "k") in range(10)


class TestVersionedMetadata(ConformanceCase):
    """Tier VersionedMetadata: D2, and what upstream does not ask."""

    async def test_d2_none_means_must_not_exist(
        self, versioned: VersionedMetadata, ids: Ids
    ) -> None:
        """The first set_if with None creates; the second is told that it was not written."""
        name = ids("n")
        assert await versioned.get_versioned(name, "k") is None
        revision = await versioned.set_if(name, "k", 1, None)
        assert revision
        assert await versioned.set_if(name, "k", 2, None) is None
        found = await versioned.get_versioned(name, "k")
        assert found is not None
        assert (found.value, found.revision) == (1, revision)

    async def test_d2_a_match_writes_and_a_stale_revision_does_not(
        self, metadata: MetadataStore, versioned: VersionedMetadata, ids: Ids
    ) -> None:
        """A matching revision gives a new one; the old one is stale from then on."""
        name = ids("n")
        one = await versioned.set_if(name, "k", 1, None)
        two = await versioned.set_if(name, "k", 2, one)
        assert two
        assert two != one
        assert await versioned.set_if(name, "k", 3, one) is None
        assert await versioned.set_if(name, "k", 3, "made-up") is None
        assert await metadata.get(name, "k") == 2
        found = await versioned.get_versioned(name, "k")
        assert found is not None
        assert found.revision == two

    async def test_a_revision_of_an_absent_pair_matches_nothing(
        self, metadata: MetadataStore, versioned: VersionedMetadata, ids: Ids
    ) -> None:
        """Expecting a revision where nothing is: not written."""
        name = ids("n")
        assert await versioned.set_if(name, "k", 1, "1.abc") is None
        assert await metadata.get(name, "k") is None

    async def test_the_any_mark_of_backends_is_no_revision(
        self, versioned: VersionedMetadata, ids: Ids
    ) -> None:
        """A caller cannot skip the check: "*" and the empty text are revisions of nothing."""
        name = ids("n")
        await versioned.set_if(name, "k", 1, None)
        for odd in ("*", ""):
            assert await versioned.set_if(name, "k", 2, odd) is None
        found = await versioned.get_versioned(name, "k")
        assert found is not None
        assert found.value == 1

    async def test_a_plain_set_changes_the_revision(
        self, metadata: MetadataStore, versioned: VersionedMetadata, ids: Ids
    ) -> None:
        """Set between read and set_if is noticed, also when it writes the same value."""
        name = ids("n")
        one = await versioned.set_if(name, "k", 1, None)
        await metadata.set(name, "k", 1)
        found = await versioned.get_versioned(name, "k")
        assert found is not None
        assert found.revision != one
        assert await versioned.set_if(name, "k", 2, one) is None

    async def test_a_revision_never_returns_after_a_delete(
        self, metadata: MetadataStore, versioned: VersionedMetadata, ids: Ids
    ) -> None:
        """Delete and create again: the old revision stays stale (no ABA)."""
        name, seen = ids("n"), set[str]()
        for _ in range(5):
            revision = await versioned.set_if(name, "k", "same", None)
            assert revision is not None
            assert revision not in seen
            seen.add(revision)
            await metadata.delete(name, "k")
            assert await versioned.get_versioned(name, "k") is None
        await versioned.set_if(name, "k", "new", None)
        for old in seen:
            assert await versioned.set_if(name, "k", "aba", old) is None
        assert await metadata.get(name, "k") == "new"

    async def test_of_concurrent_set_ifs_one_wins(
        self, metadata: MetadataStore, versioned: VersionedMetadata, ids: Ids
    ) -> None:
        """Ten writers on one revision, and ten on absence: one success each."""
        name, expected = ids("n"), None
        for _ in range(3):
            results = await gather([versioned.set_if(name, "k", n, expected) for n in range(10)])
            winners = [n for n, revision in enumerate(results) if revision is not None]
            assert len(winners) == 1
            assert await metadata.get(name, "k") == winners[0]
            expected = results[winners[0]]

    async def test_null_is_refused(self, versioned: VersionedMetadata, ids: Ids) -> None:
        """set_if refuses null as set does."""
        with pytest.raises(InvalidValue):
            await versioned.set_if(ids("n"), "k", None, None)
