"""A resources server out of NeMo Gym's own wheel, with that in the path: ``nemo_gym_server.py WHEEL MODULE CLASS PORT``.

It is served as `SimpleServer` builds it, without Gym's launcher and Ray; its interpreter has what the wheel needs.
"""

import importlib
import sys
from typing import Any
from unittest.mock import MagicMock

wheel, module, name, port = sys.argv[1:]
sys.path.insert(0, wheel)


def main() -> None:
    import uvicorn
    from nemo_gym.server_utils import ServerClient

    server: Any = getattr(importlib.import_module(f"resources_servers.{module}.app"), name)
    config = server.model_fields["config"].annotation(host="127.0.0.1", port=int(port), entrypoint="", name=module)
    made = server(config=config, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(made.setup_webserver(), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
