"""Real servers in processes of their own, spoken to over HTTP on loopback."""
