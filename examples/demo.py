"""A chat that survives its server: what is streamed is compared with what comes back.

    python examples/demo.py

Starts ``scripted_server.py`` (another process) on a new SQLite file and talks to it over HTTP as a
browser would: turns, tools, an approval, a tool of the browser that fails, a widget. Kills it with
SIGKILL while a run waits for an approval, starts it again, approves in a fresh client; kills it in
the middle of an answer, starts it again and reloads. Prints what was posted, streamed, stored and
what came back. The exit code is 0 only if what came back equals what was streamed, field by field.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from chatkeep import open_persistence
from chatkeep.stores import ThreadView, ViewQuery
from chatkeep.testkit.client import comparable
from chatkeep.testkit.scripted import browser_tools
from chatkeep.testkit.tab import Exchange, Tab, user_message

SERVER = Path(__file__).with_name("scripted_server.py")
THREAD = "demo"
LEASE_MS = 1_500
TURNS = (
    ("a plain answer", "Hello there"),
    ("a server tool", "SCENARIO:server-tool"),
    ("a tool that fails", "SCENARIO:server-tool-error"),
    ("an answer with reasoning", "SCENARIO:reasoning"),
    ("a structured answer", "SCENARIO:structured"),
    ("a search that shows its progress", "SCENARIO:activity"),
    ("a run that breaks off", "SCENARIO:error"),
)
SLOW = 'SCENARIO:slow {"chunks": 60, "delayMs": 50}'


class Timeline:
    """Lines with the seconds since the start, and the verdicts."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.failures = 0

    def say(self, who: str, what: str) -> None:
        print(f"{time.monotonic() - self.start:7.2f} s  {who:<9} {what}", flush=True)

    def head(self, title: str) -> None:
        print(f"\n          -- {title}", flush=True)

    def check(self, what: str, ok: bool) -> None:
        self.failures += not ok
        self.say("equal" if ok else "DIFFERENT", what)


class Server:
    """The chat server, a process of its own."""

    def __init__(self, store: str, timeline: Timeline) -> None:
        self.store = store
        self.timeline = timeline
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        command = [sys.executable, str(SERVER), "--port", "0", "--store", self.store]
        command += ["--drafts", "--draft-ms", "100", "--lease-ms", str(LEASE_MS)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line.startswith("ready "):
            raise SystemExit(f"the server did not start (exit code {self.process.wait()})")
        self.url = line.split()[1]
        self.timeline.say("server", f"process {self.process.pid} serves {self.url}")

    def stop(self, how: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            code = self.process.wait(20)
            self.timeline.say("server", f"process {self.process.pid}: {how.name}, exit code {code}")
            self.process = None


def short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe(message: dict[str, Any]) -> str:
    """One line of a message, as a page shows it."""
    parts: list[str] = []
    for part in message["parts"]:
        match part["type"]:
            case "text":
                parts.append(repr(short(part["content"])))
            case "thinking":
                parts.append(f"(thinking {part['content']!r})")
            case "tool-call":
                parts.append(f"{part['name']}({part['arguments']}) {part['state']}")
            case "ui-resource":
                parts.append(f"[widget {part['resource']['uri']}]")
            case "structured-output":
                parts.append(f"{part['status']} {part.get('data')}")
            case "activity":
                parts.append(f"[{part['activityType']} {part['content']}]")
            case _:
                parts.append(f"-> {short(part.get('content'))}")
    return f"{message['role']:<9} {message['id'][:12]}  {' '.join(parts) or '(nothing)'}"


def streamed(timeline: Timeline, exchange: Exchange, tab: Tab) -> None:
    counts = Counter(exchange.types)
    timeline.say("streamed", " ".join(f"{t}*{n}" if n > 1 else t for t, n in counts.items()))
    last_user = max(i for i, m in enumerate(tab.messages) if m["role"] == "user")
    for message in tab.messages[last_user + 1 :]:
        timeline.say("shown", describe(message))
    error = exchange.terminal
    if error is not None and error["type"] == "RUN_ERROR":
        timeline.say("", f"the run failed: {error['message']}")
    for descriptor in exchange.interrupts:
        timeline.say("waiting", f"{descriptor['id'][:20]}  {descriptor['message']}")


async def stored(timeline: Timeline, store: str) -> None:
    """What is in the database: read past server and client."""
    view = await look(store)
    statuses = ", ".join(f"{n} {s}" for s, n in Counter(run.status for run in view.runs).items())
    timeline.say("stored", f"{len(view.messages)} messages, {len(view.runs)} runs: {statuses}")


async def look(store: str) -> ThreadView:
    async with open_persistence(store) as persistence:
        return await persistence.backends[0].read_view(THREAD, ViewQuery(runs="all"))


def compare(timeline: Timeline, live: list[dict[str, Any]], back: list[dict[str, Any]]) -> None:
    """Every field of every message that was on the page, against what was hydrated."""
    want, got = comparable(live), comparable(back)
    timeline.check(f"{len(want)} messages in the same order", len(want) == len(got))
    for shown, loaded in zip(want, got, strict=False):
        paths = list(differences(shown, loaded, ""))
        timeline.check(describe(shown), not paths)
        for path in paths:
            timeline.say("", f"  {path}")


def differences(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b})
        lack = "(absent)"
        return [d for k in keys for d in differences(a.get(k, lack), b.get(k, lack), f"{path}.{k}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i in range(len(a)) for d in differences(a[i], b[i], f"{path}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{path}: streamed {a!r}, came back {b!r}"]


async def talk(timeline: Timeline, tab: Tab, store: str) -> None:
    """The turns of one user in one tab."""
    for title, text in TURNS:
        timeline.head(title)
        timeline.say("posted", text)
        streamed(timeline, await tab.send(text), tab)
    timeline.head("the same question again: regenerate")
    await tab.send("Hello again")
    before = tab.messages[-1]["id"]
    timeline.say("posted", f"everything but the answer {before[:12]}")
    streamed(timeline, await tab.regenerate(), tab)
    timeline.check("the answer is a new one", tab.messages[-1]["id"] != before)
    await stored(timeline, store)


async def asked(timeline: Timeline, tab: Tab, fresh: Tab) -> None:
    """Runs that wait for a person or for the browser, and their answers."""
    for title, scenario, answer, said in (
        ("an approval", "approval", tab.approve, "approved"),
        ("a tool of the browser that fails", "client-tool", refuse_location(tab), "failed"),
        ("a widget, and its answer", "ui-resource", click(tab), "clicked"),
    ):
        timeline.head(title)
        timeline.say("posted", f"SCENARIO:{scenario}")
        exchange = await tab.send(f"SCENARIO:{scenario}")
        streamed(timeline, exchange, tab)
        await fresh.load()
        same_pause(timeline, exchange, tab, fresh)
        answer()
        timeline.say("posted", f"{said}, as an answer to run {exchange.run_id[:12]}")
        streamed(timeline, await tab.resume(), tab)


def refuse_location(tab: Tab) -> Callable[[], None]:
    return lambda: tab.fail(text="the user does not share it")


def click(tab: Tab) -> Callable[[], None]:
    return lambda: tab.output(value={"clicked": True})


def same_pause(timeline: Timeline, exchange: Exchange, tab: Tab, fresh: Tab) -> None:
    """What a page that is opened now shows of the paused run."""
    waiting = fresh.hydrated["interrupts"] or {"pending": []}
    shown = [{k: v for k, v in d.items() if k != "owner"} for d in waiting["pending"]]
    timeline.check(
        f"{len(shown)} question waits in a fresh page, byte for byte",
        shown == exchange.interrupts != [],
    )
    live, back = comparable(tab.messages), comparable(fresh.messages)
    timeline.check(f"{len(live)} messages, as the pausing page shows them", live == back)


async def killed_while_paused(
    timeline: Timeline, tab: Tab, server: Server, http: httpx.AsyncClient
) -> Tab:
    """Pause, kill the server, start it, answer in a fresh page; that page."""
    timeline.head("kill -9 while an approval waits")
    timeline.say("posted", "SCENARIO:approval")
    exchange = await tab.send("SCENARIO:approval")
    streamed(timeline, exchange, tab)
    server.stop(signal.SIGKILL)
    await stored(timeline, server.store)
    server.start()
    fresh = Tab(http, server.url, THREAD, tools=browser_tools())
    await fresh.load()
    same_pause(timeline, exchange, tab, fresh)
    fresh.approve()
    timeline.say("posted", "approved, in the fresh page")
    streamed(timeline, await fresh.resume(), fresh)
    timeline.check("the mail was sent", '"sent":true' in fresh.text)
    return fresh


async def killed(timeline: Timeline, tab: Tab, server: Server) -> None:
    """Post a slow turn and kill the server while it streams."""
    timeline.head("kill -9 in the middle of an answer")
    timeline.say("posted", SLOW)
    tab.messages.append(user_message(SLOW))
    types: list[str] = []
    try:
        async for exchange in tab.stream(tab.body()):
            types = exchange.types
            if server.process is not None and len(tab.text.split()) >= 25:
                server.stop(signal.SIGKILL)
    except httpx.TransportError as error:
        timeline.say("streamed", f"{tab.text.count('w')} words, then {type(error).__name__}")
    timeline.check("the stream has no terminal event", not {"RUN_FINISHED", "RUN_ERROR"} & {*types})


async def settled(timeline: Timeline, tab: Tab, store: str) -> None:
    """Reload until the dead server's run is over: its lease runs out, then it is swept."""
    deadline = time.monotonic() + 30
    if (await tab.load())["activeRun"] is not None:
        timeline.say("reload", "the run still counts as active, until its lease runs out")
    while tab.hydrated["activeRun"] or any(r.status == "running" for r in (await look(store)).runs):
        if time.monotonic() > deadline:
            raise SystemExit("the dead run stayed active")
        await asyncio.sleep(0.1)
        await tab.load()
    await tab.load()
    timeline.say("reload", f"{len(tab.messages)} messages, no active run")


async def demo(timeline: Timeline, store: str) -> None:
    server = Server(store, timeline)
    try:
        server.start()
        async with httpx.AsyncClient(timeout=30) as http:
            tab = Tab(http, server.url, THREAD, tools=browser_tools())
            await tab.load()
            await talk(timeline, tab, store)
            await asked(timeline, tab, Tab(http, server.url, THREAD))
            tab = await killed_while_paused(timeline, tab, server, http)
            await killed(timeline, tab, server)
        live = tab.messages
        timeline.head("start again, reload in a fresh client")
        await stored(timeline, store)
        server.start()
        async with httpx.AsyncClient(timeout=30) as http:
            fresh = Tab(http, server.url, THREAD)
            await settled(timeline, fresh, store)
            await stored(timeline, store)
            timeline.head("what came back, against what was streamed")
            cut = live[-1]
            compare(timeline, live[:-1], fresh.messages[:-1])
            compare_cut(timeline, cut, fresh.messages[-1])
            timeline.head("the conversation goes on")
            timeline.say("posted", "Still there?")
            streamed(timeline, await fresh.send("Still there?"), fresh)
            again = Tab(http, server.url, THREAD)
            await again.load()
            compare(timeline, fresh.messages[-2:], again.messages[-2:])
            await stored(timeline, store)
        server.stop(signal.SIGTERM)
    finally:
        server.stop(signal.SIGKILL)


def compare_cut(timeline: Timeline, live: dict[str, Any], back: dict[str, Any]) -> None:
    """The answer that the kill cut off: the same message, as far as it had been saved."""
    shown = "".join(p["content"] for p in live["parts"] if p["type"] == "text")
    kept = "".join(p["content"] for p in back["parts"] if p["type"] == "text")
    reason = back.get("metadata", {}).get("tanstack", {}).get("stopReason")
    timeline.say("cut off", f"streamed {len(shown.split())} words, {len(kept.split())} were saved")
    timeline.check(f"its id {back['id'][:12]}", back["id"] == live["id"])
    timeline.check(
        "its text is the beginning of what streamed", shown.startswith(kept) and kept != ""
    )
    timeline.check(f"it says that it is not whole (stopReason {reason!r})", reason == "error")


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat that survives its server.")
    parser.add_argument("--keep", type=Path, help="folder for the database; default: a new one")
    parser.add_argument("--store", help="URL of an empty store (redis://…); default: a SQLite file")
    options = parser.parse_args()
    timeline = Timeline()
    with tempfile.TemporaryDirectory(prefix="chatkeep-demo-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(demo(timeline, options.store or f"sqlite:///{folder / 'chat.db'}"))
    verdict = (
        "everything came back" if not timeline.failures else f"{timeline.failures} differences"
    )
    print(f"\n{verdict}")
    sys.exit(1 if timeline.failures else 0)


if __name__ == "__main__":
    main()
