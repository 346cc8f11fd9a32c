"""Graphs, the memory inside them, and what it costs: `Graph`, `capture`, `graph_memory`."""

from __future__ import annotations

from remap.drivers.graph_powers import GraphFigures, NodeKind
from remap.graphs.capturing import Capture, capture
from remap.graphs.executable import Executable
from remap.graphs.footprint import GraphPool, Sample, Series, Watch, graph_memory
from remap.graphs.graph import Graph
from remap.graphs.nodes import Allocation, Condition, GraphMemory, Node

__all__ = [
    "Allocation",
    "Capture",
    "Condition",
    "Executable",
    "Graph",
    "GraphFigures",
    "GraphMemory",
    "GraphPool",
    "Node",
    "NodeKind",
    "Sample",
    "Series",
    "Watch",
    "capture",
    "graph_memory",
]
