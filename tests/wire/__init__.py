"""The wire contract: recorded traffic of the browser client, and the official AG-UI client."""
