"""Dashboards: they can be read, Grafana can read them, and they lie where they belong as made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from cluster.dashboards import generate
from cluster.dashboards.boards import DASHBOARDS, annotation_queries, panel_queries
from cluster.dashboards.generate import DEPLOYED
from cluster.dashboards.panels.spec import (
    WIDTH,
    Dashboard,
    GridPosition,
    Panel,
    grid_positions,
    row_bottom,
)
from cluster.dashboards.provision import MADE, SOURCE_UID

PANELS = [panel for board in DASHBOARDS for panel in board.panels()]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_panels_can_be_read(panel: Panel) -> None:
    assert panel.title and len(panel.title) <= 6 * panel.width  # at 1440 pixels
    assert panel.about.endswith(".")
    assert panel.unit  # one for all queries
    assert panel.width >= 3 and panel.height >= 4
    limits = [value for value, _ in panel.limits]
    assert limits == sorted(set(limits))
    legends = [query.legend for query in panel.queries]
    assert all(legends) and len(set(legends)) == len(legends)


def laid(board: Dashboard) -> Iterator[GridPosition]:
    top = 0
    for row in board.rows:
        yield GridPosition(0, top, WIDTH, 1)
        yield from grid_positions(row, top)
        top = row_bottom(row, top)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_nothing_overlaps_and_lines_are_full(board: Dashboard) -> None:
    cells: dict[int, int] = {}
    for one, other in combinations(list(laid(board)), 2):
        apart = one.x + one.width <= other.x or other.x + other.width <= one.x
        above = one.y + one.height <= other.y or other.y + other.height <= one.y
        assert apart or above, (one, other)
    for place in laid(board):
        for y in range(place.y, place.y + place.height):
            cells[y] = cells.get(y, 0) + place.width
    assert set(cells.values()) == {WIDTH}, "a hole in the grid"
    titles = [panel.title for panel in board.panels()]
    assert len(set(titles)) == len(titles)


def test_committed_dashboards_are_up_to_date() -> None:
    boards, provisioning = generate.dashboards(), generate.provisioning()
    for folder, made in ((MADE, boards), (DEPLOYED, boards | provisioning)):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {str(path.relative_to(folder)) for path in files} == set(made)
        for name, text in made.items():
            assert (folder / name).read_text() == text, f"{name}: make dashboards"


def loaded() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(MADE.glob("*.json"))]


def test_grafana_knows_every_field() -> None:
    """By the SDK's model, but for the texts of annotations, which it does not have."""
    for board in loaded():
        for note in board["annotations"]["list"]:
            assert note.pop("textFormat") and note.pop("titleFormat")
        again = json.dumps(models.Dashboard.from_json(board), cls=JSONEncoder)
        assert json.loads(again) == board


def test_dashboards_contain_exactly_the_listed_queries() -> None:
    asked = [
        (board["uid"], panel["title"], target["expr"])
        for board in loaded()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    assert sorted(asked) == sorted(panel_queries()) and len(asked) > 80
    noted = [
        (board["uid"], note["name"], note["expr"])
        for board in loaded()
        for note in board["annotations"]["list"]
    ]
    assert sorted(noted) == sorted(annotation_queries())


def test_dashboards_select_the_provisioned_data_source() -> None:
    folder = DEPLOYED / "provisioning"
    sources = yaml.safe_load((folder / "datasources/baton.yaml").read_text())["datasources"]
    assert [source["uid"] for source in sources] == [SOURCE_UID]
    for board in loaded():
        first = board["templating"]["list"][0]
        assert (first["name"], first["current"]["value"]) == ("datasource", SOURCE_UID)
        used = {panel["datasource"]["uid"] for panel in board["panels"] if "targets" in panel}
        assert used == {"${datasource}"}
