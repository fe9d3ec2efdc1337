"""The algorithms' formulae: advantages, corrections, losses and shaping, for arrays of any library."""
