"""Environments that come as a command or an image: started for an episode, waited for, stopped."""
