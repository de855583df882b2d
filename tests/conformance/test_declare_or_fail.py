"""How the suite treats what is missing: declared, absent, half there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.memory

_MODULE = '''
import pytest
from chatkeep import compose_persistence, memory_persistence
from chatkeep.compose import define_activity_store, define_message_store
from chatkeep.testkit.conformance import *
from conformance.bags import OwnMessages, OwnScopedMessages, minimal_activities

{declared}

class Half:
    """Messages with one method of a tier that has two."""

    def __init__(self, whole):
        self.load_thread = whole.load_thread
        self.save_thread = whole.save_thread
        self.load_transcript = whole.load_transcript

@pytest.fixture(scope="module")
async def persistence():
    base = memory_persistence()
    yield {bag}
    await base.aclose()
'''

_MINIMAL = (
    'compose_persistence(base, overrides={"messages": define_message_store('
    "load_thread=base.stores.messages.load_thread, save_thread=base.stores.messages.save_thread)})"
)
_OWN = 'compose_persistence(base, overrides={"messages": OwnMessages()})'
_OWN_SCOPED = 'compose_persistence(base, overrides={"messages": OwnScopedMessages()})'
_OWN_ALONE = 'compose_persistence({"messages": OwnMessages(), "activities": minimal_activities()})'
_HALF = "type('Bag', (), {'stores': Stores(messages=Half(base.stores.messages))})"

_LIST_CASES = (
    "test_the_list_is_newest_first_and_pages_cover_it",
    "test_a_thread_keeps_the_time_of_its_creation",
    "test_the_last_page_has_no_cursor",
    "test_new_threads_between_pages_repeat_nothing",
    "test_threads_of_subagents_are_listed_only_when_asked_for",
    "test_a_deleted_thread_is_listed_no_more",
)


def run(tmp_path: Path, bag: str, declared: str = "", *options: str) -> str:
    """Run the suite on a bag, as a user would; its report."""
    source = _MODULE.format(bag=bag, declared=declared)
    source = source.replace("class Half", "from chatkeep.backends import Stores\n\nclass Half")
    (tmp_path / "test_mine.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options,
         "test_mine.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_store_that_is_missing_and_not_declared_fails(tmp_path: Path) -> None:
    """No silence: every case about the store fails, and says how to declare it."""
    bag = 'compose_persistence(base, overrides={"metadata": False})'
    report = run(tmp_path, bag, "", "-k", "TestMetadata or TestShape")
    assert "the metadata store is missing: name it in `skip` if that is meant" in report
    assert "failed" in report or "error" in report


def test_a_declared_store_is_skipped_by_name(tmp_path: Path) -> None:
    """Declared: the rest of the suite passes, and the report names the store."""
    bag = 'compose_persistence(base, overrides={"metadata": False, "activities": False})'
    report = run(tmp_path, bag, 'skip = {"metadata", "activities"}')
    assert "declared: no metadata store" in report
    assert "failed" not in report.splitlines()[-1]
    assert "error" not in report.splitlines()[-1]


def test_a_declared_store_that_is_there_fails(tmp_path: Path) -> None:
    """A declaration that is not true would hide cases."""
    report = run(tmp_path, "base", 'skip = {"metadata"}', "-k", "TestMetadata")
    assert "skip declares the metadata store as missing, but it is there" in report


def test_a_misspelt_declaration_fails(tmp_path: Path) -> None:
    """``skip`` may only name stores and tiers."""
    report = run(tmp_path, "base", 'skip = {"metdata"}', "-k", "TestShape")
    assert "1 failed" in report


def test_an_absent_tier_skips_by_itself_and_is_named(tmp_path: Path) -> None:
    """A store of two methods passes; each tier that it lacks is reported as skipped."""
    report = run(tmp_path, _MINIMAL, "", "-k", "TestShape or TestMessages or TestCut or TestPaged")
    for tier in ("RevisionedMessages", "PagedMessages", "CutArchive"):
        assert f"tier {tier} is absent" in report
    assert "failed" not in report.splitlines()[-1]


def test_half_a_tier_fails(tmp_path: Path) -> None:
    """A tier is whole or absent."""
    declared = 'skip = {"runs", "interrupts", "activities", "metadata"}'
    report = run(tmp_path, _HALF, declared, "-k", "TestShape and whole")
    assert "RevisionedMessages: ['splice_thread'] missing" in report
    assert "1 failed" in report


def test_an_own_transcript_passes_as_the_guide_declares_it(tmp_path: Path) -> None:
    """Two methods over a backend of ours: nothing fails, and each case of the list is run."""
    report = run(tmp_path, _OWN, 'skip = {"TurnBackend", "Scope"}', "-vv")
    assert " failed" not in report.splitlines()[-1]
    assert "error" not in report.splitlines()[-1]
    for case in _LIST_CASES:
        assert f"TestThreadAdmin::{case}[asyncio] PASSED" in report


def test_a_declared_thread_admin_is_skipped_by_name(tmp_path: Path) -> None:
    """A bag can do it as every Persistence can; who does not want it tested says so."""
    report = run(tmp_path, _OWN, 'skip = {"ThreadAdmin"}', "-k", "TestThreadAdmin")
    assert "declared: no ThreadAdmin" in report
    assert "passed" not in report.splitlines()[-1]
    assert "failed" not in report.splitlines()[-1]


def test_a_list_that_can_show_nothing_is_skipped_by_name(tmp_path: Path) -> None:
    """No store has a backend: the cases of the list say why they are not run."""
    declared = 'skip = {"runs", "interrupts", "metadata"}'
    report = run(tmp_path, _OWN_ALONE, declared, "-vv", "-k", "TestThreadAdmin")
    assert "tier ThreadAdmin lists nothing here" in report
    assert "failed" not in report.splitlines()[-1]
    assert "TestThreadAdmin::test_export_has_everything[asyncio] PASSED" in report
    for case in _LIST_CASES:
        assert f"TestThreadAdmin::{case}[asyncio] SKIPPED" in report


def test_turns_of_an_own_scoped_transcript_are_skipped_by_name(tmp_path: Path) -> None:
    """Its messages store has no backend to commit through; its whole threads are tested."""
    report = run(tmp_path, _OWN_SCOPED, "", "-vv", "-k", "TestScope")
    assert "tier TurnBackend is absent: the messages store has none behind it" in report
    assert "TestScope::test_whole_threads_are_of_one_scope[asyncio] PASSED" in report
    assert "failed" not in report.splitlines()[-1]


@pytest.mark.parametrize(
    ("module", "package"),
    [("conformance", "pytest"), ("conformance", "hypothesis"), ("state_machine", "hypothesis")],
)
def test_without_the_extra_the_import_names_it(module: str, package: str) -> None:
    """A package of the extra is not installed: MissingExtra says what to install."""
    code = f"import sys; sys.modules[{package!r}] = None; from chatkeep.testkit.{module} import *"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "MissingExtra" in done.stderr.splitlines()[-1]
    assert 'pip install "chatkeep[testkit]"' in done.stderr.splitlines()[-1]


def test_a_single_class_can_be_subclassed(tmp_path: Path) -> None:
    """The other way in: one class, the fixture and ``skip`` on it."""
    (tmp_path / "test_mine.py").write_text(
        "import pytest\n"
        "from chatkeep import memory_persistence\n"
        "from chatkeep.testkit import conformance\n\n"
        "class TestMine(conformance.TestActivities):\n"
        '    skip = {"TurnBackend"}\n\n'
        "    @pytest.fixture\n"
        "    async def persistence(self):\n"
        "        async with memory_persistence() as persistence:\n"
        "            yield persistence\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
