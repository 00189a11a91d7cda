"""Any reward behind HTTP."""
