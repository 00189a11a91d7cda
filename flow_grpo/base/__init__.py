"""What every part stands on: random streams, processes, folders, checksums. It imports no other package."""
