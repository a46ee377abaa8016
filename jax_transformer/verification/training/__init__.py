"""Both sides trained from the same state on the same batches, and why their ways part."""
