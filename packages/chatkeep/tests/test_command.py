"""The command line does what it says, and fails in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatkeep.__main__ import main


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'chat.db'}"


@pytest.mark.sqlite
def test_migrate_creates_what_check_then_finds(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("check", "sweep"):
        assert main([command, url]) == 1
        assert "chatkeep migrate" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []  # looking makes nothing
    assert main(["migrate", url]) == 0
    assert main(["migrate", url]) == 0
    assert main(["check", url]) == 0
    assert capsys.readouterr().out == "ok\n"
    assert main(["sweep", url]) == 0


@pytest.mark.sqlite
def test_sql_is_printed_and_nothing_is_run(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", url, "--sql"]) == 0
    assert "CREATE TABLE chatkeep_threads" in capsys.readouterr().out
    assert not (tmp_path / "chat.db").exists()


@pytest.mark.sqlite
def test_sql_for_postgresql_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    assert main(["migrate", url, "--sql", "--schema", "chats"]) == 0
    assert "CREATE TABLE chats.chatkeep_threads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["migrate", "memory://", "--sql"], "nothing to print"),
        (["check", "redis://localhost"], 'pip install "chatkeep[redis]"'),
        (["check", "nonsense"], "no backend"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "redis://" in arguments[1]:
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [])
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("chatkeep: ")
    assert captured.err.count("\n") == 1
    assert complaint in captured.err
