"""Files that a run writes to be resumed, evaluated or published."""
