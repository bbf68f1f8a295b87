"""`make dashboards`: writes the dashboards and the files in deploy/grafana and deploy/prometheus.

Like ``grafana_panels`` it needs Grafana's SDK, a dependency of development only.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from cluster.dashboards import grafana_panels, provision
from cluster.dashboards.boards import DASHBOARDS
from cluster.dashboards.panels.spec import (
    WIDTH,
    Dashboard,
    DashboardAnnotation,
    grid_positions,
    row_bottom,
)
from cluster.monitoring.files import RuleOptions, write_prometheus
from cluster.monitoring.prometheus import ScrapeConfig

TAG = "baton"
DEPLOYED = Path(__file__).parents[2] / "deploy" / "grafana"
"""Folder with Grafana's provisioning, and with links to the dashboards."""


def dashboards() -> dict[str, str]:
    """Return the text of the dashboards by file name."""
    return {
        f"{board.uid.removeprefix('baton-')}.json": dashboard_json(board) for board in DASHBOARDS
    }


def provisioning() -> dict[str, str]:
    """Return the text of the other files in deploy/grafana by path."""
    return provision.provisioning_files(provision.BY_ENVIRONMENT)


def dashboard_json(board: Dashboard) -> str:
    """Return Grafana's JSON of a dashboard."""
    return json.dumps(build_dashboard(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def build_dashboard(board: Dashboard) -> models.Dashboard:
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
    made.with_variable(_data_source_variable())
    made.with_variable(
        _label_variable("cluster", "Cluster", "label_values(baton_replicas, cluster)")
    )
    of_cluster = 'label_values(baton_replicas{cluster=~"$cluster"}, model)'
    made.with_variable(_label_variable("model", "Model", of_cluster))
    made.annotations([_Annotation(each) for each in board.annotations])
    _add_rows(made, board)
    return made.build()


def _add_rows(made: builders.Dashboard, board: Dashboard) -> None:
    top, number = 0, 0
    for row in board.rows:
        number += 1
        header = (
            builders.Row(row.title).id(number).grid_pos(models.GridPos(h=1, w=WIDTH, x=0, y=top))
        )
        made.with_row(header)
        for panel, position in zip(row.panels, grid_positions(row, top), strict=True):
            number += 1
            made.with_panel(grafana_panels.build_panel(panel, number, position))
        top = row_bottom(row, top)


def _data_source_variable() -> builders.DatasourceVariable:
    current = models.VariableOption(
        selected=True, text=provision.SOURCE_NAME, value=provision.SOURCE_UID
    )
    made = builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    return made.current(current)


def _label_variable(name: str, label: str, query: str) -> builders.QueryVariable:
    """Return a variable with which one, several or all values of a label are chosen."""
    made = builders.QueryVariable(name).label(label).query({"query": query, "refId": name})
    made.datasource(grafana_panels.SOURCE).multi(True).include_all(True).all_value(".*")
    made.current(models.VariableOption(selected=True, text="All", value="$__all"))
    return made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        models.VariableSort.ALPHABETICAL_ASC
    )


class _AnnotationModel(models.AnnotationQuery):
    """An annotation with its text, which the SDK does not support."""

    text_format = ""

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"textFormat": self.text_format, "titleFormat": self.name}


class _Annotation(builders.AnnotationQuery):
    def __init__(self, annotation: DashboardAnnotation) -> None:
        self._internal = _AnnotationModel()
        self._internal.text_format = annotation.text
        self.name(annotation.name).datasource(grafana_panels.SOURCE).enable(True)
        self.icon_color(annotation.colour).expr(annotation.expr.text)


def main() -> None:
    """Write all generated files."""
    for folder, files in ((provision.MADE, dashboards()), (DEPLOYED, provisioning())):
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    scrape = ScrapeConfig(("http://127.0.0.1:8000",))
    write_prometheus(DEPLOYED.parent / "prometheus", scrape, RuleOptions())


if __name__ == "__main__":
    main()
