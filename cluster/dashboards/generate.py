"""Writes the dashboards, and deploy/grafana: `make dashboards`. Needs the SDK, as `panels` does."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from cluster.dashboards import grafana_panels, provision
from cluster.dashboards.boards import DASHBOARDS
from cluster.dashboards.panels.spec import WIDTH, Dashboard, Note, below, places

TAG = "baton"
DEPLOYED = Path(__file__).parents[2] / "deploy" / "grafana"
"""Grafana's provisioning, and links to the dashboards."""


def dashboards() -> dict[str, str]:
    """The files of the dashboards, by names."""
    return {f"{board.uid.removeprefix('baton-')}.json": text(board) for board in DASHBOARDS}


def provisioning() -> dict[str, str]:
    """The others in deploy/grafana, by names there."""
    return provision.files(provision.BY_ENVIRONMENT)


def text(board: Dashboard) -> str:
    """Grafana's JSON of a dashboard."""
    return json.dumps(built(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def built(board: Dashboard) -> models.Dashboard:
    made = builders.Dashboard(board.title).uid(board.uid).description(board.about).tags([TAG])
    made.time("now-1h", "now").refresh("10s").timezone("browser").editable()
    made.tooltip(models.DashboardCursorSync.CROSSHAIR)
    made.link(
        builders.DashboardLink("Baton")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .keep_time(True)
        .include_vars(True)
    )
    made.with_variable(_sources())
    made.with_variable(_picked("cluster", "Cluster", "label_values(baton_replicas, cluster)"))
    of_cluster = 'label_values(baton_replicas{cluster=~"$cluster"}, model)'
    made.with_variable(_picked("model", "Model", of_cluster))
    made.annotations([_Annotation(note) for note in board.notes])
    _fill(made, board)
    return made.build()


def _fill(made: builders.Dashboard, board: Dashboard) -> None:
    top, number = 0, 0
    for row in board.rows:
        number += 1
        line = builders.Row(row.title).id(number).grid_pos(models.GridPos(h=1, w=WIDTH, x=0, y=top))
        made.with_row(line)
        for panel, place in zip(row.panels, places(row, top), strict=True):
            number += 1
            made.with_panel(grafana_panels.built(panel, number, place))
        top = below(row, top)


def _sources() -> builders.DatasourceVariable:
    current = models.VariableOption(
        selected=True, text=provision.SOURCE_NAME, value=provision.SOURCE_UID
    )
    made = builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    return made.current(current)


def _picked(name: str, label: str, query: str) -> builders.QueryVariable:
    """One, several, or all values of a label."""
    made = builders.QueryVariable(name).label(label).query({"query": query, "refId": name})
    made.datasource(grafana_panels.SOURCE).multi(True).include_all(True).all_value(".*")
    made.current(models.VariableOption(selected=True, text="All", value="$__all"))
    return made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        models.VariableSort.ALPHABETICAL_ASC
    )


class _AnnotationModel(models.AnnotationQuery):
    """With the text, which the SDK does not know."""

    text_format = ""

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"textFormat": self.text_format, "titleFormat": self.name}


class _Annotation(builders.AnnotationQuery):
    def __init__(self, note: Note) -> None:
        self._internal = _AnnotationModel()
        self._internal.text_format = note.text
        self.name(note.name).datasource(grafana_panels.SOURCE).enable(True)
        self.icon_color(note.colour).expr(note.expr.text)


def main() -> None:
    for folder, files in ((provision.MADE, dashboards()), (DEPLOYED, provisioning())):
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


if __name__ == "__main__":
    main()
