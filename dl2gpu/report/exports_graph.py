"""The wait-for graph of a finding as DOT (Graphviz) and GraphML (yEd, Gephi, NetworkX)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from xml.etree import ElementTree as ET

from dl2gpu.report.graph_model import Box, Picture, picture_of
from dl2gpu.report.words import safe

__all__ = ["dot", "graphml"]

_SHAPES: Final = {"cycle": "box", "root": "octagon", "waits": "box"}
_NAMESPACE: Final = "http://graphml.graphdrawing.org/xmlns"
_KEYS: Final = (
    ("title", "string"), ("role", "string"), ("where", "string"), ("operation", "string"),
    ("communicator", "string"), ("call_site", "string"), ("count", "long"), ("culprit", "boolean"),
)  # fmt: skip


def dot(f: Mapping[str, Any], label: str) -> str:
    """``dot -Tsvg`` draws it: the circle in a cluster of its own, culprits with a bold frame."""
    picture = picture_of(f)
    return "\n".join(_dot(picture, f"{label}: {safe(f['kind'] or '', 60)}")) + "\n"


def quoted(text: str) -> str:
    r"""A quoted string of DOT, in which ``\"``, ``\\`` and ``\n`` mean something."""
    inner = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{inner}"'


def _dot(picture: Picture, title: str) -> Iterator[str]:
    yield "digraph waits_for {"
    yield f"  label={quoted(title)}; labelloc=t; rankdir=TB; newrank=true;"
    yield '  node [shape=box, style=rounded, fontname="Helvetica"]; edge [arrowsize=0.8];'
    circle = picture.circle
    if circle:
        yield "  subgraph cluster_circle {"
        yield f"    label={quoted('the circle')}; style=dashed; color=red;"
        yield from (f"    {_vertex(i, box)}" for i, box in enumerate(picture.boxes[:circle]))
        yield "  }"
    for i, box in enumerate(picture.boxes):
        if i >= circle:
            yield f"  {_vertex(i, box)}"
    for a, b in picture.edges:
        style = " [color=red, penwidth=2]" if a < circle and b < circle else ""
        yield f"  n{a} -> n{b}{style};"
    yield "}"


def _vertex(number: int, box: Box) -> str:
    lines = [box.title, box.where, box.doing, f"of {box.comm}" if box.comm else "", box.site]
    text = quoted("\n".join(line for line in lines if line))
    style = ", penwidth=3, color=red" if box.blamed else ""
    return f"n{number} [label={text}, shape={_SHAPES[box.role]}{style}];"


def graphml(f: Mapping[str, Any], label: str) -> str:
    """A node a group of places, an edge from who waits to what is waited for."""
    picture = picture_of(f)
    ET.register_namespace("", _NAMESPACE)
    root = ET.Element(f"{{{_NAMESPACE}}}graphml")
    for name, kind in _KEYS:
        _add(root, "key", {"id": name, "for": "node", "attr.name": name, "attr.type": kind})
    _add(
        root, "key", {"id": "circle", "for": "edge", "attr.name": "circle", "attr.type": "boolean"}
    )
    for name in ("job", "kind"):
        _add(root, "key", {"id": name, "for": "graph", "attr.name": name, "attr.type": "string"})
    graph = _add(root, "graph", {"id": "waits_for", "edgedefault": "directed"})
    for name, text in (("job", label), ("kind", safe(f["kind"] or "", 60))):
        _add(graph, "data", {"key": name}).text = text
    for i, box in enumerate(picture.boxes):
        node = _add(graph, "node", {"id": f"n{i}"})
        values = (
            box.title, box.role, box.where, box.doing, box.comm, box.site, str(box.count),
            str(box.blamed).lower(),
        )  # fmt: skip
        for (name, _), value in zip(_KEYS, values, strict=True):
            _add(node, "data", {"key": name}).text = value
    for i, (a, b) in enumerate(picture.edges):
        edge = _add(graph, "edge", {"id": f"e{i}", "source": f"n{a}", "target": f"n{b}"})
        on_circle = max(a, b) < picture.circle
        _add(edge, "data", {"key": "circle"}).text = str(on_circle).lower()
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add(parent: ET.Element, name: str, attributes: dict[str, str]) -> ET.Element:
    return ET.SubElement(parent, f"{{{_NAMESPACE}}}{name}", attributes)
