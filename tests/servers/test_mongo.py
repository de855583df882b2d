"""The MongoDB test server does what the fault tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, NetworkTimeout

from servers.mongo import GivenMongo, MongoDatabase, MongoProcess, MongoServer
from servers.process import ServerError

pytestmark = pytest.mark.mongo


def test_a_killed_server_comes_back_on_its_port_with_its_data(own_mongo: MongoProcess) -> None:
    """Every write that was acknowledged."""
    with own_mongo.client(serverSelectionTimeoutMS=2000) as client:
        for number in range(50):
            client["x"]["y"].insert_one({"_id": number})
        first = own_mongo.pid
        own_mongo.kill()
        assert not psutil.pid_exists(first)
        with pytest.raises(AutoReconnect):
            client["x"]["y"].count_documents({})
        own_mongo.start()
        assert client["x"]["y"].count_documents({}) == 50


def test_a_paused_server_answers_once_it_is_resumed(own_mongo: MongoProcess) -> None:
    with own_mongo.client(socketTimeoutMS=300, retryReads=False) as client:
        client["x"]["y"].insert_one({"_id": 1})
        own_mongo.pause()
        with pytest.raises(NetworkTimeout):
            client["x"]["y"].find_one()
        own_mongo.resume()
        assert client["x"]["y"].find_one() == {"_id": 1}


def test_databases_are_empty_and_separate(mongo: MongoServer) -> None:
    with mongo.database() as one, mongo.database() as two:
        with one.opened() as database:
            database["c"].insert_one({"_id": 1})
        with two.opened() as database:
            assert database.list_collection_names() == []


def test_a_proxy_stands_between_the_client_and_its_server(mongo_database: MongoDatabase) -> None:
    """The client does not ask for the members of the set and go around it."""
    with mongo_database.server.proxy() as proxy:
        client: MongoClient[Any] = MongoClient(mongo_database.url(proxy=proxy))
        with client:
            client[mongo_database.name]["c"].insert_one({"_id": 1})
            before = proxy.bytes_sent
            client[mongo_database.name]["c"].find_one()
            assert proxy.bytes_sent > before
    with mongo_database.opened() as database:
        assert database["c"].count_documents({}) == 1


def test_a_given_url_keeps_its_login_and_options() -> None:
    given = GivenMongo("mongodb://me:secret@one.example:27018,two.example/?replicaSet=rs")
    assert given.url("db") == "mongodb://me:secret@one.example:27018,two.example/db?replicaSet=rs"
    with given.proxy() as proxy:
        through = given.url("db", proxy=proxy)
    assert through.startswith(f"mongodb://me:secret@127.0.0.1:{proxy.port}/db?")
    with pytest.raises(ServerError):
        GivenMongo("http://x")


def test_a_missing_server_is_a_failure_that_says_how_to_get_one(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_it(mongo): pass\ndef test_that(own_mongo): pass\n")
    (tmp_path / "conftest.py").write_text(
        "import importlib.util as it\n"
        "find = it.find_spec\n"
        "it.find_spec = lambda name, *rest: None if name == 'secantus' else find(name, *rest)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "CHATKEEP_TEST_MONGO_URL"}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = mongo: needs MongoDB\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "servers.mongo_plugin", "-p", "no:cacheprovider",
         str(test), "--rootdir", str(tmp_path)],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "CHATKEEP_TEST_MONGO_URL" in done.stdout
    assert "2 errors" in done.stdout
