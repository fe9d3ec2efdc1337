"""The reward of a policy that trains a part of what another one asks for: that of its own seats. Pure."""

import statistics

import msgspec

from fleetbus_schemas import Message, StepTrained

REWARD_OF_SEAT = "reward_of_"


def show_own_reward(message: Message) -> Message:
    """A step of the policy of a seat with the mean reward of its own seats for that of the episodes, which is another's."""
    if not isinstance(message, StepTrained):
        return message
    kept = {name: value for name, value in message.metrics.items() if name not in ("reward", "success")}
    own = [value for name, value in kept.items() if name.startswith(REWARD_OF_SEAT)]
    return msgspec.structs.replace(message, metrics=({"reward": statistics.fmean(own)} if own else {}) | kept)
