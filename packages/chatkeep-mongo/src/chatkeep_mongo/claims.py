"""Run ids: each belongs to one thread of its scope, also when two threads reach for it at once.

Before a commit that creates a run, its thread puts a *claim* under the run's key: the document that
the run will be, without a body. Nobody reads a claim. One that a crash left behind holds up nobody,
and no clock is asked how old it is:

* a thread commits the run only with a head that it read *before* it put, or renewed, its claim;
* another thread takes the claim over only after it has drawn a new stamp for that head (the
  owner's commit then fails), and only if the claim was not renewed meanwhile.
"""

from __future__ import annotations

from chatkeep.codec import FORMAT_VERSION
from chatkeep.records import RunRecord
from chatkeep.scope import Scope
from chatkeep_mongo.driver import Driver
from chatkeep_mongo.found import has_body
from chatkeep_mongo.head import Head, new_stamp
from chatkeep_mongo.layout import RUNS, THREADS, Document, new_incarnation, owner_key, run_key
from chatkeep_mongo.redo import complete

__all__ = ["claim_run"]

_OF_A_RUN = (
    "body",
    "piece",
    "parts",
    "status",
    "parent",
    "detached_since",
    "lease_token",
    "lease_until",
    "draft",
    "draft_at",
    "draft_piece",
    "draft_parts",
)
"""What a run has and a claim has not."""


async def claim_run(db: Driver, scope: Scope, head: Head, run: RunRecord) -> bool:
    """Claim a run's id for the thread of ``head``; False: look again, something has changed."""
    key = run_key(scope, run.run_id)
    tenant, user = scope.key
    claim: Document = {
        "_id": key,
        "t": head.t,
        "v": 0,
        "nonce": new_stamp(),
        "thread": head.key,
        "owner": owner_key(scope),
        "tenant": tenant,
        "user": user,
        "thread_id": run.thread_id,
        "run_id": run.run_id,
        "format": FORMAT_VERSION,
    }
    if run.parent_run_id is not None:
        # Who lists its children finds it, and with it what its thread's commit left undone.
        claim["parent"] = run_key(scope, run.parent_run_id)
    if await db.insert(RUNS, [claim]):
        return True
    found = await db.find(RUNS, {"_id": key}, dict.fromkeys((*claim, "body", "piece"), 1))
    if not found:
        return False
    stored = found[0]
    ours = stored["thread"] == head.key and stored["t"] == head.t
    if ours and has_body(stored):
        return False
    if not ours and not await _fenced(db, stored):
        return False
    del claim["_id"]
    # Its version too: a claim may have become a run while its head was looked at.
    same = {"_id": key, **{name: stored[name] for name in ("t", "nonce", "v")}}
    return await db.update(
        RUNS, same, {"$set": claim, "$unset": {n: "" for n in _OF_A_RUN if n not in claim}}
    )


async def _fenced(db: Driver, claim: Document) -> bool:
    """Whether the thread that put ``claim`` can no longer commit under it."""
    key = claim["thread"]
    fields = {"t": 1, "stamp": 1, "redo": 1, "gone": 1}
    found = await db.find(THREADS, {"_id": key}, fields)
    if not found:
        # Its first commit would insert the head: now it cannot.
        return await db.insert(THREADS, [_placeholder(key)])
    owner = found[0]
    if owner.get("gone") or owner.get("redo") is not None:
        await complete(db, key)
        return False
    if owner["t"] != claim["t"]:
        return True  # written in a thread that was deleted since
    if has_body(claim):
        return False
    same = {"_id": key, "stamp": owner["stamp"]}
    return await db.update(THREADS, same, {"$set": {"stamp": new_stamp()}})


def _placeholder(key: str) -> Document:
    """A head that no commit has written: its thread does not exist."""
    empty = Head(key=key, t=new_incarnation(), stamp=new_stamp())
    return {"_id": key, "t": empty.t, **empty.changes(), "redo": None, "format": FORMAT_VERSION}
