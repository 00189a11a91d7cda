"""Base of all other packages: random streams, processes, folders, checksums. It imports none of them."""
