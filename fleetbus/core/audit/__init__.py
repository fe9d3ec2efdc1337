"""The books of a run, balanced from its entries alone."""
