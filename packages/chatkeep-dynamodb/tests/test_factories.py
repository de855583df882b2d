"""How a persistence is made, and what is refused."""

from __future__ import annotations

from typing import Any

import boto3
import pytest

import chatkeep
from chatkeep import open_persistence
from chatkeep.errors import CompositionError
from chatkeep_dynamodb import DynamoDBBackend, dynamodb_persistence, open_url


@pytest.fixture
def client(aws_credentials: None) -> Any:
    made = boto3.client("dynamodb", region_name="eu-central-1")
    yield made
    made.close()


def source(persistence: chatkeep.Persistence) -> Any:
    backend: Any = persistence.backends[0]
    return backend._source


@pytest.mark.parametrize("name", ["ab", "", "a b", "x" * 256, "a/b", None, 7, "tablé"])
def test_a_name_that_no_table_has_is_refused(name: Any) -> None:
    with pytest.raises(CompositionError, match="no name of a table"):
        dynamodb_persistence(name)


def test_a_table_may_be_named_by_its_arn() -> None:
    arn = "arn:aws:dynamodb:eu-central-1:123456789012:table/chats"
    assert dynamodb_persistence(arn).backends[0].name == "dynamodb"


def test_what_is_no_client_of_dynamodb_is_refused(client: Any) -> None:
    other = boto3.client("s3", region_name="eu-central-1")
    for wrong in (object(), "client", other):
        with pytest.raises(CompositionError, match="must be boto3"):
            dynamodb_persistence("chats", client=wrong)
    other.close()
    with pytest.raises(CompositionError, match="made here"):
        dynamodb_persistence("chats", client=client, region="eu-central-1")


def test_no_threads_are_no_persistence() -> None:
    with pytest.raises(CompositionError, match="at least 1"):
        dynamodb_persistence("chats", threads=0)


def test_a_given_client_bounds_the_threads(client: Any) -> None:
    """boto3 keeps ten connections unless it is told otherwise."""
    assert source(dynamodb_persistence("chats", client=client)).threads == 10
    assert source(dynamodb_persistence("chats", client=client, threads=3)).threads == 3
    assert source(dynamodb_persistence("chats")).threads == 32


def test_a_constructor_makes_no_client() -> None:
    """boto3 reads files for one, and looks for credentials: not before the first call."""
    assert source(dynamodb_persistence("chats", region="x"))._client is None


@pytest.mark.usefixtures("aws_credentials")
def test_a_url_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "dynamodb://Chats_1.prod?region=eu-west-1&endpoint=http%3A%2F%2F127.0.0.1%3A8000"
    persistence = open_persistence(url, timeout=5, threads=4, create=False)
    backend: Any = persistence.backends[0]
    assert isinstance(backend, DynamoDBBackend)
    assert (backend._table.name, backend.timeout, backend._create) == ("Chats_1.prod", 5, False)
    client = source(persistence).get()
    assert client.meta.region_name == "eu-west-1"
    assert client.meta.endpoint_url == "http://127.0.0.1:8000"
    assert client.meta.config.max_pool_connections == 4
    client.close()
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    made = source(open_url("dynamodb://chats")).get()
    assert made.meta.region_name == "eu-north-1"
    made.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("dynamodb://", "dynamodb://table"),
        ("dynamodb:///chats", "dynamodb://table"),
        ("dynamodb://chats/more", "dynamodb://table"),
        ("dynamodb://chats#x", "dynamodb://table"),
        ("dynamodb://a?region=x", "no name of a table"),
        ("dynamodb://chats?reigon=x", "'reigon' means nothing"),
        ("dynamodb://chats?region=x&endpoint_url=y", "'endpoint_url' means nothing"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, said: str) -> None:
    with pytest.raises(CompositionError, match=said):
        open_persistence(url)


def test_the_core_has_the_factory() -> None:
    assert chatkeep.dynamodb_persistence is dynamodb_persistence
