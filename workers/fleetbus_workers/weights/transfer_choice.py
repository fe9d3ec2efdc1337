"""The backend of transfers that ``weights.transfer`` names; torch is imported where one is used."""

from __future__ import annotations

from fleetbus.bus.base import CallBus
from fleetbus.bus.objects import ObjectStore
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import Configuration
from fleetbus_schemas import Subjects
from fleetbus_workers.weights.transfer import ReceivesVersions, TakesTensors, WeightsReceiver, WeightsSender


def open_sender(bus: CallBus, subjects: Subjects, configuration: Configuration, runtime: Runtime) -> WeightsSender | None:
    """The sender that ``weights.transfer`` names; None: files alone."""
    settings = configuration.weights
    if settings.transfer == "files":
        return None
    from fleetbus_workers.weights.collective.sender import CollectiveSender

    return CollectiveSender(
        bus,
        subjects,
        policy=configuration.run.policy,
        address=settings.transfer_address,
        seconds=settings.transfer_seconds,
        runtime=runtime,
    )


def open_receiver(
    bus: CallBus, configuration: Configuration, sampler: object, objects: ObjectStore | None
) -> WeightsReceiver | None:
    """The receiver that ``weights.transfer`` names, if the engine takes what it receives; None: files alone."""
    settings, policy, subjects = configuration.weights, configuration.run.policy, Subjects(configuration.run.name)
    if settings.transfer == "files":
        return None
    if isinstance(sampler, ReceivesVersions):
        from fleetbus_workers.weights.collective.engine_receiver import EngineReceiver

        return EngineReceiver(bus, subjects, sampler, policy=policy, seconds=settings.transfer_seconds, objects=objects)
    if isinstance(sampler, TakesTensors):
        from fleetbus_workers.weights.collective.receiver import CollectiveReceiver

        return CollectiveReceiver(bus, subjects, sampler, policy=policy, seconds=settings.transfer_seconds, objects=objects)
    return None
