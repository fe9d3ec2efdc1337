"""``fleetbus schema``: the contract, for programs that are not Python."""

import click

from fleetbus_schemas.asyncapi import build_asyncapi
from fleetbus_schemas.export import build_json_schema
from fleetbus_workers.cli.output import print_json


@click.command("schema")
@click.option("--asyncapi", "as_asyncapi", is_flag=True, help="Print AsyncAPI 3: subjects, roles and messages")
def command(as_asyncapi: bool) -> None:
    """Print the JSON Schema of every message, or an AsyncAPI 3 document with subjects and senders."""
    if as_asyncapi:
        document = build_asyncapi()
    else:
        document = build_json_schema()
    print_json(document)
