"""How rewards ask a server."""
