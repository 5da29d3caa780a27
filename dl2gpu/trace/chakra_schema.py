"""The messages of a Chakra trace, for protobuf to decode.

Written from the field numbers of FORMATS.md 4.2. Texts are declared as bytes, which are the same on
the wire: one that is no UTF-8 then costs no node.
"""

from __future__ import annotations

import functools
from typing import Any, Final

__all__ = ["ATTRIBUTES", "attribute", "metadata_class", "node_class"]

_PACKAGE: Final = "dl2gpu.chakra"
_ONEOF: Final = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32",
    "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
"""Kinds of an attribute's value, from field 3 on: one value, and a list of them."""

ATTRIBUTES: Final = 4096
"""So many attributes of one node are looked at."""


@functools.cache
def _classes() -> dict[str, Any]:
    # late: only these traces need it
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="dl2gpu/chakra.proto", package=_PACKAGE, syntax="proto3"
    )
    types = descriptor_pb2.FieldDescriptorProto

    def field(message: Any, name: str, number: int, kind: Any, many: bool = False) -> Any:
        made = message.field.add(name=name, number=number)
        made.label = types.LABEL_REPEATED if many else types.LABEL_OPTIONAL
        if isinstance(kind, str):
            made.type, made.type_name = types.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
        else:
            made.type = kind
        return made

    attr = file.message_type.add(name="Attribute")
    field(attr, "name", 1, types.TYPE_BYTES)
    attr.oneof_decl.add(name="value")
    for i, spelled in enumerate(_ONEOF):
        text = spelled == "string"
        kind = types.TYPE_BYTES if text else getattr(types, f"TYPE_{spelled.upper()}")
        several = file.message_type.add(name=f"{spelled.capitalize()}List")
        field(several, "values", 1, kind, many=True)
        field(attr, spelled, 3 + 2 * i, kind).oneof_index = 0
        field(attr, f"{spelled}_list", 4 + 2 * i, several.name).oneof_index = 0
    arguments = file.message_type.add(name="Arguments")
    for number, name in enumerate(("values", "shapes", "types"), 1):
        field(arguments, name, number, types.TYPE_BYTES)
    metadata = file.message_type.add(name="Metadata")
    field(metadata, "version", 1, types.TYPE_BYTES)
    field(metadata, "attr", 2, "Attribute", many=True)
    node = file.message_type.add(name="Node")
    field(node, "id", 1, types.TYPE_UINT64)
    field(node, "name", 2, types.TYPE_BYTES)
    field(node, "type", 3, types.TYPE_INT32)
    field(node, "start_time_micros", 6, types.TYPE_UINT64)
    field(node, "duration_micros", 7, types.TYPE_UINT64)
    field(node, "inputs", 8, "Arguments")
    field(node, "attr", 10, "Attribute", many=True)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in ("Metadata", "Node")
    }


def metadata_class() -> Any:
    """Class of the first message of a file."""
    return _classes()["Metadata"]


def node_class() -> Any:
    """Class of the others. Dependencies are not among its fields."""
    return _classes()["Node"]


def attribute(found: Any) -> tuple[str, Any]:
    """Name and value of an attribute: a number, text, truth value, or a list of these."""
    name = found.name.decode("utf-8", "replace")
    kind = found.WhichOneof("value")
    if kind is None:
        return name, None
    value = getattr(found, kind)
    if kind.endswith("_list"):
        return name, list(value.values)
    return name, value.decode("utf-8", "replace") if kind == "string" else value
