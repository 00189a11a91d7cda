"""Server of a reward over HTTP."""
