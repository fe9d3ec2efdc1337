"""The warehouse of the default tasks, as data: what stands in it, drawn from a seed, and what may be asked. Pure.

One warehouse has `ITEMS_PER_WAREHOUSE` of the twenty items with random ids, and three fields each. A task asks for one
field of one item; the agent must look the id up (``find_item``), read the field (``get_field``) and answer: three turns.
"""

import random

import msgspec

from fleetbus_schemas import ToolSpec

NAMES = (
    "bolt", "nut", "gear", "lamp", "rope", "nail", "pump", "belt", "hose", "disk",
    "plug", "fuse", "cord", "tape", "drum", "tray", "rack", "pipe", "coil", "lens",
)  # fmt: skip
FIELDS = ("price", "stock", "shelf")
ITEMS_PER_WAREHOUSE = 8

TOOLS = (
    ToolSpec(
        name="find_item",
        description="Find the id of an item.",
        parameters={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    ),
    ToolSpec(
        name="get_field",
        description="Read a field of an item.",
        parameters={
            "type": "object",
            "properties": {"id": {"type": "integer"}, "field": {"type": "string"}},
            "required": ["id", "field"],
        },
    ),
)
"""What the warehouse's MCP server lists, in this order and with these schemas."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the warehouse; every number is in 10..99."""

    id: int
    name: str
    price: int
    stock: int
    shelf: int

    def field(self, name: str) -> int:
        value = getattr(self, name)
        assert isinstance(value, int)
        return value


class Warehouse(msgspec.Struct, frozen=True, kw_only=True):
    """A warehouse and the question asked of it: ``field`` of the item called ``name``."""

    items: tuple[Item, ...]
    name: str
    field: str

    @property
    def answer(self) -> int:
        return next(item.field(self.field) for item in self.items if item.name == self.name)


def draw_warehouse(seed: int) -> Warehouse:
    """The warehouse of a seed; the same in every process."""
    draw = random.Random(seed)
    names = draw.sample(NAMES, ITEMS_PER_WAREHOUSE)
    ids = draw.sample(range(10, 100), ITEMS_PER_WAREHOUSE)
    items = tuple(
        Item(id=id, name=name, **{field: draw.randrange(10, 100) for field in FIELDS})
        for id, name in zip(ids, names, strict=True)
    )
    return Warehouse(items=items, name=draw.choice(names), field=draw.choice(FIELDS))


def question(warehouse: Warehouse) -> str:
    """The prompt of the task. Quoted, so that the words are the same tokens as inside the JSON of a call."""
    return f'Read "{warehouse.field}" of "{warehouse.name}".'
