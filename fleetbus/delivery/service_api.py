"""Every worker as a NATS micro service: `nats micro ls|info|stats` and any client find it (PING, INFO, STATS of ADR-32).

One subscription on ``$SRV.>`` answers what is asked of all services, of this worker's role, or of this worker. It changes
nothing.
"""

import datetime

import msgspec
import structlog

from fleetbus.bus.base import Bus, Request
from fleetbus.errors import BusError
from fleetbus.package_version import read_fleetbus_version
from fleetbus_schemas import Subjects
from fleetbus_schemas.protocol import PROTOCOL

SERVICE_SUBJECTS = "$SRV.>"
VERBS = ("PING", "INFO", "STATS")
TYPE = "io.nats.micro.v1.{verb}_response"

log = structlog.get_logger()


class Microservice:
    """One worker's answers. The one endpoint is where it takes control requests."""

    def __init__(self, bus: Bus, subjects: Subjects, *, role: str, worker: str) -> None:
        self._bus = bus
        self._answered = 0
        self._worker = worker
        self.name = f"fleetbus-{role}"
        self.identifier = f"{subjects.run}-{worker}"
        self._control = subjects.control(role, worker, "*")
        self._metadata = {"run": subjects.run, "role": role, "worker": worker, "protocol": str(PROTOCOL)}
        self._started = ""

    async def run(self) -> None:
        """Answer until cancelled."""
        self._started = datetime.datetime.fromtimestamp(self._bus.now_ns() / 1e9, datetime.UTC).isoformat()
        async with self._bus.serve(SERVICE_SUBJECTS) as server:
            while True:
                await self._answer(await server.receive())

    async def _answer(self, request: Request) -> None:
        verb = self.parse_verb(request.subject)
        if verb is None:
            return
        try:
            await request.respond(msgspec.json.encode(self.build_response(verb)))
            self._answered += 1
        except BusError as error:
            log.warning("service request failed; sending no answer", subject=request.subject, reason=str(error))

    def parse_verb(self, subject: str) -> str | None:
        """The verb of a request, None if it is addressed to another service."""
        verb, *of = subject.split(".")[1:]
        if verb not in VERBS or of not in ([], [self.name], [self.name, self.identifier]):
            return None
        return verb

    def build_response(self, verb: str) -> dict[str, object]:
        """The answer to one of `VERBS`."""
        response: dict[str, object] = {
            "type": TYPE.format(verb=verb.lower()),
            "name": self.name,
            "id": self.identifier,
            "version": read_fleetbus_version() or "0.0.0",  # a semantic one, as NATS wants it
            "metadata": self._metadata,
        }
        endpoint: dict[str, object] = {"name": "control", "subject": self._control, "queue_group": ""}
        if verb == "INFO":
            response |= {"description": f"{self._worker}: a worker of run {self._metadata['run']}", "endpoints": [endpoint]}
        elif verb == "STATS":
            counts = {"num_requests": self._answered, "num_errors": 0, "last_error": ""}
            counts |= {"processing_time": 0, "average_processing_time": 0}
            response |= {"started": self._started, "endpoints": [endpoint | counts]}
        return response
