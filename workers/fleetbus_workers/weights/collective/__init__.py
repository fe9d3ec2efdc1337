"""Versions that go from the learner to engines' memory while their file is written, by collectives of torch.distributed."""
