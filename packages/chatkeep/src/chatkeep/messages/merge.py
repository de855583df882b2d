"""A posted history merged into the stored one, by id.

**Which rows stay.** The last posted row that is also stored is the cutoff: what is stored
behind it is cut, unknown rows are appended in order. Nothing known: everything stays and
everything is appended. Nothing posted: the thread goes on as it is. A stored row that the post
leaves out in the middle stays; a new row between known ones goes to the end.

* The cutoff includes what a client shows inside the same message: tool rows right behind the
  assistant row, and further segments with its id.
* A tool row is recognised by the assistant row that holds its call and its ``toolCallId``, not
  by its id: clients make ids for results up, and providers reuse call ids in later turns.
* Dropped, because they say nothing: assistant rows without content and calls that are not
  stored, rows with the id of a stored activity, placeholders for a result to come, results for
  calls that wait for an answer (the answers are in ``resume``), repeats within one post.
* A row without an id that equals (role, content, calls; structurally) the stored row in its
  place is that row. Its place is right behind the row posted before it. At the head of a post
  one equal row alone may be a new turn with the words of an old one, so there the posted rows
  must equal the whole thread, at least its first two rows, or its unanswered end.

**Which fields of a known row a client may change.** A posted copy is lossy, and what it cannot
carry must not be wiped. The stored row is the truth; from the copy are taken only:

* user and system rows: ``content``, ``name``, the user's own metadata keys and unknown keys, each
  where the copy has it with another value (of a part of the content too: one that only lacks
  keys is the stored part);
* assistant rows: the user's own metadata keys; the text, unless it is a beginning of the stored
  text (a copy from before the stream ended) or the text a client makes of the stored row (raw of
  a structured part behind the prose). A message in several segments keeps its text;
* tool rows: nothing, except that a result replaces a stored placeholder.

So ids, creation times, calls, thinking and signatures, structured output, widgets, error
state, result parts and everything in ``metadata.tanstack`` stay as stored. A row from which
nothing was taken is the stored object itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from chatkeep.messages.parts import (
    Row,
    bag_of,
    calls_of,
    is_list,
    is_placeholder,
    is_row,
    put_bag,
    text_of,
)
from chatkeep.records import ModelMessage

__all__ = ["Merge", "MergeKind", "merge_messages"]

MergeKind: TypeAlias = Literal["continue", "append", "regenerate", "edit"]
"""``continue``: nothing changed. ``append``: nothing is cut. ``regenerate``: a cut, and the
user said nothing new. ``edit``: a cut, and a user row is new or has other content."""

_ANSWERED_BY_USER = frozenset({"user", "system"})
_KEPT = frozenset({"id", "role", "content", "createdAt", "metadata", "name"})


@dataclass(frozen=True, slots=True)
class Merge:
    """What a post makes of a thread.

    ``messages`` is the whole new list; stored rows that did not change are in it by identity.
    ``keep`` counts the stored rows that stay in front, changed ones included. ``first_change``
    is the first position where ``messages`` and the stored list differ by identity (``keep``
    if rows were only cut or appended). ``cut`` are the stored rows that went, ``appended`` the
    rows behind ``keep``.
    """

    messages: list[ModelMessage]
    keep: int
    first_change: int
    cut: list[ModelMessage]
    appended: list[ModelMessage]
    kind: MergeKind


def merge_messages(
    stored: Sequence[ModelMessage],
    incoming: Sequence[ModelMessage],
    *,
    pending_tool_calls: AbstractSet[str] = frozenset(),
    activity_ids: AbstractSet[str] = frozenset(),
    match_content: bool = False,
) -> Merge:
    """Merge ``incoming`` (from :func:`wire_to_model`) into ``stored``.

    ``pending_tool_calls`` are the calls that wait for an answer, ``activity_ids`` the ids of the
    thread's activity rows. ``match_content`` compares rows with unknown ids like rows without
    one: for clients that mint new ids for the whole history with every post.
    """
    plan = _Plan(cast("Sequence[Row]", stored), pending_tool_calls, activity_ids, match_content)
    plan.read(cast("Sequence[Row]", incoming))
    return plan.merge()


class _Thread:
    """The stored rows and where to find them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.by_id: dict[str, int] = {}
        self.results: dict[tuple[int, str], int] = {}
        self.holders: dict[str, int] = {}  # call id -> last message that holds it
        for place, row in enumerate(rows):
            name = row.get("id")
            if name:
                self.by_id.setdefault(name, place)
            role = row.get("role")
            if role == "assistant":
                calls = row.get("toolCalls")
                if calls:
                    first = self.by_id[name] if name else place
                    for call in cast("list[Row]", calls):
                        self.holders[call["id"]] = first
            elif role == "tool":
                call_id = row.get("toolCallId", "")
                self.results.setdefault((self.holders.get(call_id, -1), call_id), place)

    def message(self, place: int) -> range:
        """The rows of the message at ``place``: its segments and their results.

        For a tool row the message is the one before it.
        """
        rows, start = self.rows, place
        while start > 0 and rows[start].get("role") == "tool":
            start -= 1
        head = rows[start]
        if head.get("role") != "assistant":
            return range(place, place + 1)
        end, name = start + 1, head.get("id")
        while end < len(rows):
            role = rows[end].get("role")
            if role != "tool" and not (
                role == "assistant" and name and rows[end].get("id") == name
            ):
                break
            end += 1
        return range(start, end)


class _Plan:
    def __init__(
        self,
        stored: Sequence[Row],
        pending: AbstractSet[str],
        activities: AbstractSet[str],
        match_content: bool,
    ) -> None:
        self.thread = _Thread(stored)
        self._pending = pending
        self._activities = activities
        self._match_content = match_content
        self.steps: list[tuple[Row, int | None]] = []  # posted row, its stored place
        self._anchors: set[int] = set()  # steps that may be the cutoff
        self._owners: dict[str, int] = {}  # call id -> stored place of the posted message
        self._fresh_calls: set[str] = set()  # calls of posted messages that are not stored
        self._last: int | None = None  # stored place of the row read last, if it has one

    # -------------------------------------------------------------------------- read

    def read(self, incoming: Sequence[Row]) -> None:
        head = self._head(incoming)
        for index, row in enumerate(incoming):
            name = row.get("id")
            if name and name in self._activities:
                continue
            if row.get("role") == "tool":
                place = self._result_place(row)
            else:
                place = self.thread.by_id.get(name) if name else None
            anchor = place is not None
            if place is None and (not name or self._match_content):
                if index in head:
                    place = head[index]
                elif self._last is not None and self._is_next(row):
                    place, anchor = self._next(row), True
            self._note_calls(row, place)
            if place is None and self._says_nothing(row):
                continue
            if anchor:
                self._anchors.add(len(self.steps))
            self.steps.append((row, place))
            self._last = place

    def _note_calls(self, row: Row, place: int | None) -> None:
        for call in calls_of(row):
            if place is None:
                self._fresh_calls.add(call["id"])
                self._owners.pop(call["id"], None)
            else:
                self._fresh_calls.discard(call["id"])
                self._owners[call["id"]] = place

    def _result_place(self, row: Row) -> int | None:
        call_id = row.get("toolCallId", "")
        if call_id in self._fresh_calls:
            return None
        owner = self._owners.get(call_id, self.thread.holders.get(call_id, -1))
        place = self.thread.results.get((owner, call_id))
        if place is not None:
            return place
        place = self.thread.by_id.get(row.get("id", ""))
        if place is None or self.thread.rows[place].get("toolCallId") != call_id:
            return None
        return place

    def _says_nothing(self, row: Row) -> bool:
        if row.get("role") == "tool":
            return row.get("toolCallId") in self._pending or is_placeholder(row.get("content"))
        return (
            row.get("role") == "assistant"
            and not row.get("content")
            and not row.get("toolCalls")
            and not row.get("structuredOutput")
            and not bag_of(row).get("uiResources")
        )

    def _next(self, row: Row) -> int:
        """Where the stored row behind the one read last stands."""
        last = cast("int", self._last)
        return last + 1 if row.get("role") == "tool" else self.thread.message(last).stop

    def _is_next(self, row: Row) -> bool:
        place = self._next(row)
        return place < len(self.thread.rows) and _same(self.thread.rows[place], row)

    def _head(self, incoming: Sequence[Row]) -> dict[int, int]:
        """Leading rows without a known id that are stored rows, by content."""
        rows = self.thread.rows
        block: list[Row] = []
        for row in incoming:
            name = row.get("id")
            if name and (not self._match_content or name in self.thread.by_id):
                break
            block.append(row)
        if not block or not rows:
            return {}
        length = 0
        while length < min(len(block), len(rows)) and _same(rows[length], block[length]):
            length += 1
        unnamed = 0  # rows that have no id on either side need no further sign
        while unnamed < length and not rows[unnamed].get("id") and not block[unnamed].get("id"):
            unnamed += 1
        if length < 2 and length < len(rows):
            length = unnamed
        if length:
            return {i: i for i in range(length)}
        start = len(rows) - len(block)
        unanswered = rows[-1].get("role") in _ANSWERED_BY_USER
        if (
            start >= 0
            and unanswered
            and all(_same(rows[start + i], row) for i, row in enumerate(block))
        ):
            return {i: start + i for i in range(len(block))}
        return {}

    # ------------------------------------------------------------------------- merge

    def merge(self) -> Merge:
        stored = self.thread.rows
        keep = self._cutoff()
        tail = _Tail(stored, keep)
        copies: dict[int, list[Row]] = {}  # stored place -> posted copies
        for row, place in self.steps:
            if place is None:
                tail.add(row)
            else:
                copies.setdefault(place, []).append(row)
                if place >= keep and place not in tail.back:
                    tail.bring_back(self.thread.message(place))
        messages = [*stored[:keep], *tail.rows]
        first_change, said = keep, tail.said
        for place, posted in copies.items():
            current = stored[place]
            updated = self._update(place, posted)
            if updated is current:
                continue
            said = said or (
                current.get("role") == "user" and updated["content"] != current.get("content")
            )
            if place < keep:
                messages[place] = updated
                first_change = min(first_change, place)
            else:
                messages[keep + tail.back[place]] = updated
        cut = [row for place, row in enumerate(stored[keep:], keep) if place not in tail.back]
        # A row that came back to its own place was never gone.
        while keep < min(len(stored), len(messages)) and messages[keep] is stored[keep]:
            first_change += first_change == keep
            keep += 1
        kind: MergeKind
        if cut:
            kind = "edit" if said else "regenerate"
        elif len(messages) == len(stored) == first_change:
            kind = "continue"
        else:
            kind = "append"
        merged = cast("list[ModelMessage]", messages)
        return Merge(
            messages=merged,
            keep=keep,
            first_change=first_change,
            cut=cast("list[ModelMessage]", cut),
            appended=merged[keep:],
            kind=kind,
        )

    def _cutoff(self) -> int:
        """How many stored rows stay in front."""
        if not self._anchors:
            return len(self.thread.rows)
        place = self.steps[max(self._anchors)][1]
        return self.thread.message(cast("int", place)).stop

    def _update(self, place: int, posted: list[Row]) -> Row:
        current = self.thread.rows[place]
        role = current.get("role")
        copy = posted[-1]
        if role == "tool":
            if is_placeholder(current.get("content")) and not self._says_nothing(copy):
                kept = {k: v for k, v in current.items() if k not in ("content", "error")}
                taken: Row = {k: copy[k] for k in ("content", "error") if k in copy}
                return {**kept, **taken}
            return current
        if copy.get("role") != role:
            return current
        changes = _plain_changes(current, copy) if role != "assistant" else {}
        if role == "assistant":
            text = self._new_text(place, posted)
            if text is not None:
                changes["content"] = _with_text(current.get("content"), text)
        metadata = _own_metadata(current, copy)
        if not changes and metadata is None:
            return current
        updated = {**current, **changes}
        if metadata is not None:
            bag = bag_of(current)
            updated["metadata"] = metadata
            put_bag(updated, bag)
        return updated

    def _new_text(self, place: int, posted: list[Row]) -> str | None:
        """The text of an assistant message if the client changed it, else None."""
        rows = self.thread.rows
        segments = [
            rows[i] for i in self.thread.message(place) if rows[i].get("role") == "assistant"
        ]
        if len(segments) > 1:
            return None  # an edit could not be told apart by segment
        texts = _texts(rows[place])
        said = {text_of(copy.get("content")) for copy in posted}
        if len(posted) > 1:
            said.add("".join(text_of(copy.get("content")) for copy in posted))
        if any(text == known or known.startswith(text) for text in said for known in texts):
            return None
        return text_of(posted[-1].get("content"))


class _Tail:
    """The rows behind the cutoff, in the order of the post."""

    def __init__(self, stored: Sequence[Row], keep: int) -> None:
        self.rows: list[Row] = []
        self.back: dict[int, int] = {}  # stored place of a row that comes back -> index
        self.said = False  # whether a user row is new
        self._stored = stored
        self._keep = keep
        self._names: dict[str, int] = {}
        self._answers: dict[str, int] = {}

    def bring_back(self, message: range) -> None:
        """A stored message from behind the cutoff that the post names before it: whole, so
        that a result never comes before its call or is left behind."""
        for place in message:
            if place >= self._keep:
                self.back[place] = len(self.rows)
                self.rows.append(self._stored[place])

    def add(self, row: Row) -> None:
        """Add a new row once: a repeat takes the place of the row before it.

        Assistant rows of one turn that share an id and differ are segments, not repeats.
        """
        self.said = self.said or row.get("role") == "user"
        if row.get("role") == "tool":
            seen, key = self._answers, row.get("toolCallId")
        else:
            seen, key = self._names, row.get("id")
            for call in calls_of(row):
                self._answers.pop(call["id"], None)  # a later turn may use the call id again
        place = seen.get(key) if key else None
        if place is not None:
            rest = self.rows[place:]
            if _same(rest[0], row) or not _same_turn(rest, row):
                self.rows[place] = row
                return
        if key:
            seen[key] = len(self.rows)
        self.rows.append(row)


def _same_turn(rows: Sequence[Row], row: Row) -> bool:
    """Whether ``row`` goes on with the assistant message that ``rows`` begin with."""
    return row.get("role") == "assistant" and all(
        r.get("role") == "tool" or (r.get("role") == "assistant" and r.get("id") == row.get("id"))
        for r in rows
    )


def _texts(row: Row) -> tuple[str, ...]:
    """What clients make of an assistant row's text: as stored, and as its UI parts read."""
    text = text_of(row.get("content"))
    structured = row.get("structuredOutput")
    raw = structured.get("raw") if is_row(structured) else None
    if not is_row(structured) or not isinstance(raw, str) or not raw:
        return (text,)
    if structured.get("status") == "complete":
        return (text, text if text.endswith(raw) else text + raw)
    return (text, text.removesuffix(raw))


def _with_text(content: object, text: str) -> str | list[Row]:
    """``content`` with its text replaced; media of a list stay behind it."""
    if not is_list(content):
        return text
    media = [p for p in cast("list[Row]", content) if p.get("type") != "text"]
    return [{"type": "text", "content": text}, *media] if media else text


def _plain_changes(current: Row, copy: Row) -> Row:
    """What a posted user or system row changes, metadata aside."""
    changes: Row = {}
    content = _with_stored_parts(current.get("content"), copy.get("content"))
    if not _same_content(current.get("content"), content):
        changes["content"] = content
    if "name" in copy and copy["name"] != current.get("name"):
        changes["name"] = copy["name"]
    for key, value in copy.items():
        if key not in _KEPT and current.get(key, _ABSENT) != value:
            changes[key] = value
    return changes


def _own_metadata(current: Row, copy: Row) -> Row | None:
    """The user's metadata keys after the post (with the stored bag), None if unchanged."""
    posted = copy.get("metadata")
    if not is_row(posted):
        return None
    stored = current.get("metadata")
    known: Row = stored if is_row(stored) else {}
    taken = {
        key: value
        for key, value in posted.items()
        if key != "tanstack" and known.get(key, _ABSENT) != value
    }
    return {**known, **taken} if taken else None


_ABSENT: Any = object()


def _with_stored_parts(stored: object, posted: object) -> object:
    """The posted content, with each stored part that it says nothing new about as it is stored:
    clients drop the keys of a part that they do not know, and join parts that are all text."""
    if not is_list(stored):
        return posted
    parts = cast("list[Row]", stored)
    if isinstance(posted, str):
        whole = all(p.get("type") == "text" for p in parts) and text_of(parts) == posted
        return parts if whole else posted
    if not is_list(posted):
        return posted
    return [
        parts[i] if i < len(parts) and _within(part, parts[i]) else part
        for i, part in enumerate(cast("list[Row]", posted))
    ]


def _within(posted: object, stored: object) -> bool:
    """Whether all that ``posted`` says stands in ``stored`` too."""
    if is_row(posted) and is_row(stored):
        return all(key in stored and _within(value, stored[key]) for key, value in posted.items())
    return posted == stored


def _same_content(one: object, other: object) -> bool:
    """Structural equality; a list of nothing but text equals its joined text."""
    if one == other:
        return True
    if _only_text(one) and _only_text(other):
        return text_of(one) == text_of(other)
    return False


def _only_text(content: object) -> bool:
    if content is None or isinstance(content, str):
        return True
    parts = cast("Iterable[Row]", content)
    return is_list(content) and all(p.get("type") == "text" and len(p) == 2 for p in parts)


def _same(stored: Row, posted: Row) -> bool:
    """Whether a posted row without a usable id says what a stored row says."""
    role = stored.get("role")
    if role != posted.get("role"):
        return False
    if role == "tool":
        return stored.get("toolCallId") == posted.get("toolCallId")
    if [c["id"] for c in calls_of(stored)] != [c["id"] for c in calls_of(posted)]:
        return False
    if role == "assistant":
        return text_of(posted.get("content")) in _texts(stored)
    return _same_content(stored.get("content"), posted.get("content"))
