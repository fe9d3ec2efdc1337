"""A worker's parts as the configuration names them: engines, trainers, model folders, and who can see images."""
