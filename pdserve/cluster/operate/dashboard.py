"""A Grafana dashboard of the cluster; `pdserve dashboard` prints it, and `pdserve up` puts it
beside Ray's own.

One list of rows serves both sources: Ray's exporter (names with the prefix `ray_`) and the routers'
own pages. Each router's page has the figures of all workers. So with several routers a worker's
series come several times, and every query over workers first takes the largest value per worker.
Knows no Ray. tests/cluster/test_dashboard checks each query against metrics that exist.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pdserve.cluster.operate.dashboard_panels import Panel
from pdserve.cluster.operate.dashboard_rows import ROWS

Source = Literal["ray", "routers"]

PREFIX: dict[Source, str] = {"ray": "ray_", "routers": ""}
TITLE: dict[Source, str] = {"ray": "pdserve", "routers": "pdserve (routers' own pages)"}
# Grafana has 24 columns.
WIDTH = 8
HEIGHT = 8
PER_ROW = 3


def queries(source: Source) -> Iterator[str]:
    """Yields all of the dashboard's PromQL."""
    for row in ROWS:
        for panel in row.panels:
            yield from (_with_prefix(query.expr, source) for query in panel.queries)


def dashboard(source: Source) -> dict[str, Any]:
    """Returns the dashboard in the form that Grafana imports. `source` is what Prometheus
    scrapes."""
    return {
        "uid": f"pdserve-{source}",
        "title": TITLE[source],
        "tags": ["pdserve"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [_datasource_variable()]},
        "panels": list(_panels(source)),
    }


def place(folder: Path) -> Path | None:
    """Writes the dashboard of Ray's exporter into the folder that Ray's Grafana reads.

    Returns None if Ray has made no such folder.
    """
    if not folder.is_dir():
        return None
    path = folder / "pdserve_grafana_dashboard.json"
    path.write_text(json.dumps(dashboard("ray"), indent=1))
    return path


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "multi": False,
    }


def _panels(source: Source) -> Iterator[dict[str, Any]]:
    number = 1
    top = 0
    for row in ROWS:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, top, 24, 1),
        }
        number = number + 1
        top = top + 1
        for index, panel in enumerate(row.panels):
            column = index % PER_ROW
            line = index // PER_ROW
            yield _panel(
                panel, number, _place(column * WIDTH, top + line * HEIGHT, WIDTH, HEIGHT), source
            )
            number += 1
        top += -(-len(row.panels) // PER_ROW) * HEIGHT


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, position: dict[str, int], source: Source) -> dict[str, Any]:
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    custom = {
        "fillOpacity": 20 if panel.stacked else 0,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": datasource,
        "gridPos": position,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": datasource,
                "expr": _with_prefix(query.expr, source),
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _with_prefix(expr: str, source: Source) -> str:
    return expr.replace("P@", PREFIX[source])
