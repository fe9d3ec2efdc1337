"""Start SkyRL's Tinker-compatible server (skyrl 0.3.0) on this machine's CPU: ``python tinker_server.py api|engine OPTIONS``.

Two things keep it from starting by itself: its types need Python 3.12's TypedDict, and it starts its engine through ``uv run``.
"""

import runpy
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment,misc]


def main() -> None:
    role, sys.argv = sys.argv[1], [sys.argv[0], *sys.argv[2:]]
    if role == "engine":
        runpy.run_module("skyrl.tinker.engine", run_name="__main__")
        return
    import argparse

    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, add_model, config_to_argv

    parser = argparse.ArgumentParser()
    add_model(parser, EngineConfig)
    parser.add_argument("--port", type=int, required=True)
    arguments = vars(parser.parse_args())
    port = arguments.pop("port")
    api._build_uv_run_cmd_engine = lambda _, configuration: [
        sys.executable, __file__, "engine", *config_to_argv(configuration)
    ]  # fmt: skip
    api.app.state.engine_config = EngineConfig.model_validate(arguments)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
