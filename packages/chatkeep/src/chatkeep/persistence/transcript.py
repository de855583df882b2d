"""A thread's transcript as one run knows it, and what the run has to write of its own.

What is new is found by object identity against what was loaded: messages are never changed in
place, so an unchanged object needs no comparison, no hash and no byte on the wire.

When another writer moved the thread meanwhile, :meth:`RunTranscript.place` puts this run's own
messages into what stands there now: its answer behind its own question, a new question at the
end, every other turn whole and in its order. Only what stands behind is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

from chatkeep.messages import ensure_ids
from chatkeep.records import ModelMessage
from chatkeep.stores import NO_THREAD, Transcript

__all__ = ["Change", "CutAway", "RunTranscript", "run_tag", "with_tanstack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One splice: ``keep`` messages stay (those numbered up to ``keep_through``), ``tail``
    follows, in stored form. ``settle`` takes the numbers of the tail and the new revision
    once it is written. ``head`` makes the messages that stay (for stores without splices)."""

    keep: int
    keep_through: int
    expected: str
    head: Callable[[], Sequence[ModelMessage]]
    tail: list[ModelMessage]
    settle: Callable[[Sequence[int], str], None]

    def whole(self) -> list[ModelMessage]:
        """The full transcript after the change."""
        return [*self.head(), *self.tail]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAway:
    """The question of this run was cut by somebody else: its answer belongs to that cut.

    ``number`` and ``message_id`` name the message that the answer follows.
    """

    number: int
    message_id: str | None
    answer: list[ModelMessage]


def run_tag(message: ModelMessage) -> str | None:
    """Id of the run that produced the message, if it is tagged."""
    bag = _mapping(_mapping(message.get("metadata")).get("tanstack"))
    run_id = _mapping(bag.get("run")).get("id")
    return run_id if isinstance(run_id, str) else None


def with_tanstack(message: ModelMessage, **values: Any) -> ModelMessage:
    """A copy with these keys set under ``metadata.tanstack``; everything else stays."""
    metadata = dict(_mapping(message.get("metadata")))
    metadata["tanstack"] = {**_mapping(metadata.get("tanstack")), **values}
    return cast("ModelMessage", {**message, "metadata": metadata})


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


@dataclass(slots=True)
class _Known:
    """What the run believes to be stored: objects, their numbers, the revision."""

    messages: list[ModelMessage] = field(default_factory=list[ModelMessage])
    numbers: list[int] = field(default_factory=list[int])
    revision: str = NO_THREAD
    apart: bool = False
    """Others wrote in between: messages are stored that this run does not know."""


class RunTranscript:
    """The transcript of one run, from load to last commit."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._known = _Known()
        self._front: list[ModelMessage] = []
        self._posted: list[ModelMessage] = []
        self._forms: dict[int, tuple[ModelMessage, ModelMessage]] = {}
        self.deferred_cut = False
        """A regenerate: its cut waits for output."""

    # -- what was loaded, what was posted ------------------------------------------

    def loaded(self, stored: Transcript, *, apart: bool = False) -> None:
        """Take ``stored`` as what is there now; ``apart``: others have written behind it."""
        self._known = _Known(list(stored.messages), list(stored.numbers), stored.revision, apart)

    def begins(self, front: Sequence[ModelMessage]) -> None:
        """Take ``front`` as the transcript that the run starts from: stored messages, some
        perhaps replaced, and what was posted. What comes behind it is the run's output."""
        self._front = list(front)
        keep = _common(self._known.messages, self._front)
        self._posted = self._front[keep:]
        if keep < len(self._known.messages) and self._posted:
            stored = {id(m) for m in self._known.messages}
            names = {m.get("id") for m in self._known.messages}
            self._posted = [
                m for m in self._posted if id(m) not in stored and m.get("id") not in names
            ]

    @property
    def anchor_id(self) -> str | None:
        """Id of the message that the answer follows."""
        return self._front[-1].get("id") if self._front else None

    @property
    def newest(self) -> int:
        """Highest sequence number among the messages that this run knows (0: none)."""
        return max(self._known.numbers, default=0)

    def produced(self, mine: Sequence[ModelMessage]) -> list[ModelMessage]:
        """What the run added to the transcript it started from, in stored form."""
        return [self._produced_form(m) for m in mine[self.border(mine) :]]

    def border(self, mine: Sequence[ModelMessage]) -> int:
        """How many messages of ``mine`` stand before what the run added. Not always as many as
        it started from: a middleware may have exchanged the list for a shorter or a longer one."""
        count = len(self._front)
        if count <= len(mine) and (not count or mine[count - 1] is self._front[-1]):
            return count
        objects = {id(m) for m in self._front}
        names = {m.get("id") for m in self._front} - {None}
        at = len(mine)
        while at and id(mine[at - 1]) not in objects and mine[at - 1].get("id") not in names:
            at -= 1
        return at

    # -- what to write --------------------------------------------------------------

    def plan(self, mine: Sequence[ModelMessage]) -> Change | None:
        """What makes the stored transcript ``mine`` if nobody else wrote meanwhile; None when
        there is nothing to write. Needs :meth:`place` when :attr:`needs_place`."""
        known = self._known
        keep = _common(known.messages, mine)
        border = self.border(mine)
        if keep == len(mine) or (self.deferred_cut and border == len(mine)):
            return None
        own = max(keep, border)
        tail = [
            *(self._form(m) for m in mine[keep:own]),
            *(self._produced_form(m) for m in mine[own:]),
        ]

        def settle(numbers: Sequence[int], revision: str) -> None:
            self._known = _Known(
                list(mine), [*known.numbers[:keep], *numbers], revision, known.apart
            )
            self.deferred_cut = False

        return Change(
            keep=keep,
            keep_through=known.numbers[keep - 1] if keep else 0,
            expected=known.revision,
            head=lambda: [self._form(m) for m in mine[:keep]],
            tail=tail,
            settle=settle,
        )

    @property
    def needs_place(self) -> bool:
        """Whether the thread must be read again before anything is written: others' messages
        stand where this run cannot see them."""
        return self._known.apart

    def place(
        self, mine: Sequence[ModelMessage], now: Transcript, *, again: bool = False
    ) -> Change | CutAway | None:
        """What adds this run's messages to ``now``, which others wrote in.

        :class:`CutAway` says that the question was cut meanwhile. With ``again`` it is sent
        again instead, at the end (stores without an archive, where it was overwritten).
        """
        border = self.border(mine)
        produced = list(mine[border:])
        if self.deferred_cut and not produced:
            return None
        found = _Match(self._known.messages, self._known.numbers, now)
        replaced = self._replacements(mine, found)
        present = {id(m) for m in mine[:border]}
        front_ids = {m.get("id") for m in mine[:border]}
        gone = {
            position
            for message, position in zip(self._known.messages, found.positions, strict=True)
            if position is not None
            and id(message) not in present
            and (message.get("id") not in front_ids)
        }
        if produced:
            # A run that goes on under its own id started from rows with its tag: those stay.
            front = {
                position
                for message, position in zip(self._known.messages, found.positions, strict=True)
                if id(message) in present or message.get("id") in front_ids - {None}
            }
            gone |= self._earlier_output(produced, now, found) - front
        added = self._unstored_posts(mine, found, replaced, again=again)
        at = self._where(now, found, gone, asking=bool(added))
        if isinstance(at, CutAway):
            return CutAway(number=at.number, message_id=at.message_id, answer=self.produced(mine))
        own = [*added, *produced]
        staying = [(p, replaced.get(p, m)) for p, m in enumerate(now.messages) if p not in gone]
        target = [
            *(m for p, m in staying if p < at),
            *own,
            *(m for p, m in staying if p >= at),
        ]
        return self._change(mine, now, target, found)

    def _change(
        self,
        mine: Sequence[ModelMessage],
        now: Transcript,
        target: list[ModelMessage],
        found: _Match,
    ) -> Change | None:
        keep = _common(now.messages, target)
        if keep == len(target) == len(now.messages):
            return None
        produced = {id(m) for m in mine[self.border(mine) :]}

        def settle(numbers: Sequence[int], revision: str) -> None:
            where = {id(m): n for m, n in zip(target[keep:], numbers, strict=False)}
            where.update({id(m): n for m, n in zip(now.messages[:keep], now.numbers, strict=False)})
            twin = {
                id(old): where.get(id(now.messages[position]), 0)
                for old, position in zip(found.stored, found.positions, strict=True)
                if position is not None
            }
            numbers_of_mine = [where.get(id(m)) or twin.get(id(m), 0) for m in mine]
            self._known = _Known(list(mine), numbers_of_mine, revision, apart=True)
            self.deferred_cut = False

        return Change(
            keep=keep,
            keep_through=now.numbers[keep - 1] if keep else 0,
            expected=now.revision,
            head=lambda: now.messages[:keep],
            tail=[
                self._produced_form(m) if id(m) in produced else self._form(m)
                for m in target[keep:]
            ],
            settle=settle,
        )

    # -- the parts of place -----------------------------------------------------------

    def _replacements(self, mine: Sequence[ModelMessage], found: _Match) -> dict[int, ModelMessage]:
        """Positions in the current thread whose message this run holds in a newer form."""
        known = {id(m) for m in self._known.messages}
        fresh = [m for m in mine[: self.border(mine)] if id(m) not in known]
        if not fresh:
            return {}
        places = {
            m.get("id"): p
            for m, p in zip(self._known.messages, found.positions, strict=True)
            if m.get("id") and p is not None
        }
        return {places[m.get("id")]: m for m in fresh if m.get("id") in places}

    def _unstored_posts(
        self,
        mine: Sequence[ModelMessage],
        found: _Match,
        replaced: dict[int, ModelMessage],
        *,
        again: bool,
    ) -> list[ModelMessage]:
        stored = [] if again else self._known.messages
        known = {id(m) for m in chain(stored, replaced.values())}
        posted = {id(m) for m in self._posted} - known
        return [
            m
            for m in mine[: self.border(mine)]
            if id(m) in posted and m.get("id") not in found.by_id
        ]

    def _earlier_output(
        self, produced: Sequence[ModelMessage], now: Transcript, found: _Match
    ) -> set[int]:
        """Output of this very run that somebody else stored (a draft that a sweep kept)."""
        ids = {m.get("id") for m in produced}
        return {
            p
            for p, m in enumerate(now.messages)
            if run_tag(m) == self._run_id
            or (m.get("role") == "tool" and m.get("id") in ids and p not in found.known)
        }

    def _where(
        self, now: Transcript, found: _Match, gone: set[int], *, asking: bool
    ) -> int | CutAway:
        posted = {id(m) for m in self._posted}
        own = [
            (message, number, position)
            for message, number, position in zip(
                self._known.messages, self._known.numbers, found.positions, strict=True
            )
            if id(message) in posted
        ]
        there = [position for _, _, position in own if position is not None]
        there += [p for m in self._posted if (p := found.place(m.get("id"))) is not None]
        if there:
            return max(there) + 1
        if own and not asking:
            message, number, _ = own[-1]
            return CutAway(number=number, message_id=message.get("id"), answer=[])
        if asking or not self._front:
            return len(now.messages)
        return self._behind_turn(now, found, gone)

    def _behind_turn(self, now: Transcript, found: _Match, gone: set[int]) -> int | CutAway:
        """Behind the turn that the run continues or answers anew."""
        anchor = self._front[-1]
        number, position = 0, None
        for message, known_number, known_position in zip(
            self._known.messages, self._known.numbers, found.positions, strict=True
        ):
            if message is anchor or (anchor.get("id") and message.get("id") == anchor.get("id")):
                number, position = known_number, known_position
        if position is None:
            return CutAway(number=number, message_id=anchor.get("id"), answer=[])
        at = position + 1
        while at < len(now.messages) and (
            at in gone or now.messages[at].get("role") not in {"user", "system"}
        ):
            at += 1
        return at

    # -- stored forms -----------------------------------------------------------------

    def _form(self, message: ModelMessage) -> ModelMessage:
        kept = self._forms.get(id(message))
        return kept[1] if kept is not None else message

    def _produced_form(self, message: ModelMessage) -> ModelMessage:
        """As it is stored: with an id, and an assistant's with the tag of this run. Made once,
        so that a retry writes the same."""
        kept = self._forms.get(id(message))
        if kept is None:
            form = ensure_ids([message])[0]
            if form.get("role") == "assistant" and run_tag(form) is None:
                form = with_tanstack(form, run={"id": self._run_id})
            kept = self._forms[id(message)] = (message, form)
        return kept[1]


class _Match:
    """Where the messages that a run knows stand in the current thread: by number, and by id
    when another run's re-merge sent them again under a new number."""

    def __init__(
        self, stored: Sequence[ModelMessage], numbers: Sequence[int], now: Transcript
    ) -> None:
        by_number = {number: p for p, number in enumerate(now.numbers)}
        self.by_id: dict[str, int] = {}
        for p, message in enumerate(now.messages):
            if message_id := message.get("id"):
                self.by_id[message_id] = p
        self.stored = stored
        self.positions: list[int | None] = []
        for message, number in zip(stored, numbers, strict=True):
            position = by_number.get(number)
            message_id = message.get("id")
            if position is not None and now.messages[position].get("id") != message_id:
                position = None  # a store without numbers counts places, and they moved
            if position is None and message_id:
                position = self.by_id.get(message_id)
            self.positions.append(position)
        self.known = {p for p in self.positions if p is not None}

    def place(self, message_id: str | None) -> int | None:
        """Where the message with this id stands now; the last one if there are several."""
        return self.by_id.get(message_id) if message_id else None


def _common(left: Sequence[ModelMessage], right: Sequence[ModelMessage]) -> int:
    """How many messages in front are the same objects."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a is not b:
            break
        count += 1
    return count
