"""How rows are named: partitions, sort keys, and the parts that they are made of.

Every partition key begins with the tenant and the user, so an IAM policy on
``dynamodb:LeadingKeys`` can keep tenants apart (:func:`leading_key`). Parts are percent-encoded
and joined by ``/``, which no part contains; a part that would be long is replaced by a digest.

A thread is one partition. Its sort keys carry the thread's *incarnation*, drawn at birth, so
what is left of a deleted thread never meets the rows of a new one with the same id. The letters
are in the order in which one query reads them: activities, drafts, the head, messages.
"""

from __future__ import annotations

import base64
import zlib
from urllib.parse import quote

from chatkeep.scope import Scope, key_digest

__all__ = [
    "ACTIVITY",
    "CHILD",
    "CUT",
    "DRAFT",
    "HEAD",
    "INTERRUPT",
    "LEFTOVER",
    "LOOKUP",
    "MESSAGE",
    "RUN",
    "SHARDS",
    "VALUE",
    "behind",
    "child_sk",
    "chunk_sk",
    "due_partition",
    "interrupt_sk",
    "leading_key",
    "list_partition",
    "number_sk",
    "part",
    "row_sk",
    "run_pk",
    "sortable",
    "thread_pk",
    "value_pk",
    "value_sk",
]

ACTIVITY, DRAFT, HEAD, MESSAGE = "a", "d", "h", "m"
INTERRUPT, RUN, LEFTOVER, CUT = "p", "r", "s", "x"
LOOKUP, CHILD, VALUE = "run", "child", "v"

SHARDS = 4
"""Partitions of the index over what falls due, each good for 1 000 writes a second."""

_LONGEST_PART = 256
_SAFE = ":@+=,"


def part(text: str) -> str:
    """``text`` as a part of a key: at most 256 ASCII characters, without ``/``, ``*`` or ``?``."""
    encoded = quote(text, safe=_SAFE).replace("~", "%7E")
    if len(encoded) <= _LONGEST_PART:
        return encoded
    return "~" + base64.urlsafe_b64encode(key_digest(text)).decode().rstrip("=")


def leading_key(scope: Scope) -> str:
    """What every partition key of ``scope`` begins with, for a policy on
    ``dynamodb:LeadingKeys``: ``tenant/user/``, each percent-encoded, empty where absent."""
    tenant, user = scope.key
    return f"{part(tenant)}/{part(user)}/"


def thread_pk(scope: Scope, thread_id: str) -> str:
    """Partition of a thread."""
    return f"{leading_key(scope)}thread/{part(thread_id)}"


def run_pk(scope: Scope, run_id: str) -> str:
    """Partition of what finds a run by its bare id: its look-up, and its children."""
    return f"{leading_key(scope)}run/{part(run_id)}"


def value_pk(scope: Scope, key: str) -> str:
    """Partition of the metadata under ``key``."""
    return f"{leading_key(scope)}meta/{part(key)}"


def list_partition(scope: Scope, what: str) -> str:
    """Partition of the index ``by_scope``: ``threads``, ``subthreads`` or ``left``."""
    return leading_key(scope) + what


def due_partition(what: str, pk: str) -> str:
    """Partition of the index ``by_due`` for a row of ``pk``: ``sweep``, ``idle`` or ``cut``."""
    return f"{what}/{zlib.crc32(pk.encode()) % SHARDS}"


def number_sk(letter: str, incarnation: str, number: int) -> str:
    """Sort key of a numbered row: a message, an activity, a cut, a leftover."""
    return f"{letter}/{incarnation}/{number:016d}"


def row_sk(letter: str, incarnation: str, row_id: str) -> str:
    """Sort key of a row that has an id: a run, a draft."""
    return f"{letter}/{incarnation}/{part(row_id)}"


def interrupt_sk(incarnation: str, run_id: str, interrupt_id: str) -> str:
    """Sort key of an interrupt."""
    return f"{INTERRUPT}/{incarnation}/{part(run_id)}/{part(interrupt_id)}"


def child_sk(run_id: str) -> str:
    """Sort key of a child run in its parent's partition."""
    return f"{CHILD}/{part(run_id)}"


def value_sk(namespace: str) -> str:
    """Sort key of a metadata value."""
    return f"{VALUE}/{part(namespace)}"


def chunk_sk(sk: str, index: int) -> str:
    """Sort key of chunk ``index`` (from 1; the row itself holds the first) of a long body."""
    return f"{sk}/{index:05d}"


def behind(sk: str) -> str:
    """Above every sort key that begins with ``sk`` and ``/``, below all others."""
    return f"{sk}0"  # the character behind the slash


def sortable(number: int) -> str:
    """Text that sorts as the integer does (53 bits, negative ones too)."""
    return f"{number:016d}" if number >= 0 else f"-{10**16 + number:016d}"
