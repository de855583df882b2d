"""chatkeep on Amazon DynamoDB, in one table.

``table_definition`` gives the arguments of ``CreateTable``, for a tool that makes tables;
``leading_key`` what every partition key of a scope begins with, for an IAM policy.
"""

from __future__ import annotations

from chatkeep_dynamodb._factories import dynamodb_persistence, open_url
from chatkeep_dynamodb.backend import DynamoDBBackend
from chatkeep_dynamodb.keys import leading_key
from chatkeep_dynamodb.table import table_definition

__all__ = [
    "DynamoDBBackend",
    "dynamodb_persistence",
    "leading_key",
    "open_url",
    "table_definition",
]
