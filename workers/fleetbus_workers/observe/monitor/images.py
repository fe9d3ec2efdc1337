"""Images of observations for the page: objects of the run's bucket by their hash, if their bytes are an image and of its size.

What a message says of an image is not believed: the type is what the bytes begin with, and anything else, as SVG or HTML, is
not served. A monitor's key may not read the bucket of a server with accounts; then nothing is shown.
"""

from __future__ import annotations

import anyio
import structlog
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fleetbus.bus.objects import InvalidObjectName, ObjectMissing, ObjectReader, ObjectTooLarge, get_content
from fleetbus.errors import BusError, NotPermitted
from fleetbus_workers.images.image_formats import find_media_type

MAX_IMAGE_BYTES = 16 << 20
FETCH_SECONDS = 20.0
AT_A_TIME = 4

log = structlog.get_logger()


class ObservedImages:
    """The route ``/api/images/{object}``; ``objects``: None of a bus that has none."""

    def __init__(self, objects: ObjectReader | None) -> None:
        self._objects = objects
        self._refusal = "" if objects is not None else "this bus stores no objects"
        self._limiter = anyio.CapacityLimiter(AT_A_TIME)

    async def image(self, request: Request) -> Response:
        """The bytes of an image; 404 without it, 413 and 415 for what is too large or no image, 403 and 503 where the bucket
        may not or cannot be read."""
        if self._refusal or self._objects is None:
            return PlainTextResponse(self._refusal, 403 if self._objects is not None else 404)
        try:
            with anyio.fail_after(FETCH_SECONDS):
                async with self._limiter:
                    content = await get_content(self._objects, request.path_params["object"], max_bytes=MAX_IMAGE_BYTES)
        except InvalidObjectName as error:
            return PlainTextResponse(str(error), 400)
        except ObjectTooLarge as error:
            return PlainTextResponse(str(error), 413)
        except ObjectMissing as error:
            return PlainTextResponse(str(error), 404)
        except NotPermitted as error:
            self._refusal = "the key of this page may not read images"
            log.warning("images are not shown", reason=str(error))
            return PlainTextResponse(self._refusal, 403)
        except (BusError, OSError) as error:  # OSError has TimeoutError below it
            return PlainTextResponse(f"the image could not be read: {error}", 503)
        media_type = find_media_type(content)
        if not media_type:
            return PlainTextResponse("the object is no image", 415)
        return Response(content, media_type=media_type, headers={"content-disposition": "inline"})
