"""Runs one share of a replay, ``python -m fleetbus_workers.replay.share_process``: `shards` starts one per share.

It is a file of its own because pickles name the classes of `shards` by that module's name, not by ``__main__``.
"""

from fleetbus_workers.replay.shards import main

if __name__ == "__main__":
    main()
