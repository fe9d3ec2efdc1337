"""For your own trainers: graded groups of episodes that the workers of a run play, as lists or in other trainers' shapes.

configuration = client.load_configuration(flags={"run.name": "r1"}).configuration
async with client.connect(url, run="r1", role="operator", worker="trainer") as bus:
    async with client.rollouts(bus, configuration, tasks, group_size=8) as groups:
        async for group in groups:
            for episode in group.graded:
                for sequence in episode.sequences:
                    train(sequence.ids, sequence.loss_mask, sequence.logprobs, episode.reward)
"""

from fleetbus.bus.nats import connect
from fleetbus.client.contexts import PolicyContexts
from fleetbus.client.rollouts import Episode, RolloutGroup, SampledSequence, rollouts
from fleetbus.client.trainer_formats import convert_to_trl, convert_to_verl
from fleetbus.config.load import load_configuration

__all__ = [
    "Episode",
    "PolicyContexts",
    "RolloutGroup",
    "SampledSequence",
    "connect",
    "convert_to_trl",
    "convert_to_verl",
    "load_configuration",
    "rollouts",
]
