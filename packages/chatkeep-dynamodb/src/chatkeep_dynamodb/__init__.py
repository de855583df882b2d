"""chatkeep on Amazon DynamoDB, in one table."""
