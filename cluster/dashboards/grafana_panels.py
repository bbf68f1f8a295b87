"""Converts panels to Grafana's SDK, which only `make dashboards` imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, statetimeline
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import timeseries as lines
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from cluster.dashboards.panels.spec import GridPosition, Panel

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

Builder: TypeAlias = lines.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel


def build_panel(panel: Panel, number: int, position: GridPosition) -> Builder:
    """Return the SDK's builder of a panel; ``number`` is its id on the dashboard."""
    makers: dict[str, Callable[[Panel], Builder]] = {
        "stat": _stat,
        "heatmap": _heatmap,
        "states": _states,
    }
    made = makers.get(panel.kind, _lines)(panel)
    made.id(number).title(panel.title).description(_described(panel)).datasource(SOURCE)
    made.grid_pos(models.GridPos(h=position.height, w=position.width, x=position.x, y=position.y))
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr.text).legend_format(query.legend)
        target.datasource(SOURCE).ref_id(chr(ord("A") + index))
        _ = target.instant() if panel.kind == "stat" else target.range()
        if panel.kind == "heatmap":
            target.format(PromQueryFormat.HEATMAP)
        made.with_target(target)
    return made


def _described(panel: Panel) -> str:
    """Return the description, followed by the metrics that the panel uses."""
    uses = {m.name: m.about for query in panel.queries for m in query.expr.uses}
    return "\n".join([panel.about, "", *(f"- `{name}`: {about}" for name, about in uses.items())])


def _thresholds(panel: Panel) -> builders.ThresholdsConfig:
    steps = [models.Threshold(value=None, color=panel.calm)]
    steps += [models.Threshold(value=value, color=colour) for value, colour in panel.limits]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _lines(panel: Panel) -> lines.Panel:
    made = lines.Panel().unit(panel.unit).line_width(1).show_points(options.VisibilityMode.NEVER)
    made.color_scheme(_colour(models.FieldColorModeId.PALETTE_CLASSIC))
    made.tooltip(
        common.VizTooltipOptions()
        .mode(options.TooltipDisplayMode.MULTI)
        .sort(options.SortOrder.DESCENDING)
    )
    made.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(options.LegendDisplayMode.LIST)
        .placement(options.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull"])
    )
    _range(made, panel)
    _filled(made, panel)
    for pattern, colour in panel.colours:
        mode = "shades" if "." in pattern else "fixed"
        value = {"mode": mode, "fixedColor": colour}
        made.override_by_regexp(pattern, [models.DynamicConfigValue("color", value)])
    if any(query.legend == "objective" for query in panel.queries):
        made.override_by_name("objective", _DASHED)
    return made


def _range(made: lines.Panel, panel: Panel) -> None:
    if panel.low is not None:
        made.min(panel.low)
    if panel.high is not None:
        made.max(panel.high)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    if panel.limits:
        made.thresholds(_thresholds(panel))
        style = options.GraphThresholdsStyleMode.DASHED
        made.thresholds_style(common.GraphThresholdsStyleConfig().mode(style))


def _filled(made: lines.Panel, panel: Panel) -> None:
    made.fill_opacity({"stack": 60, "bars": 80}.get(panel.kind, 8))
    if panel.kind == "bars":
        made.draw_style(options.GraphDrawStyle.BARS)
    if panel.kind != "lines":
        made.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))


_DASHED = [
    models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
    models.DynamicConfigValue("custom.lineWidth", 2),
    models.DynamicConfigValue("custom.fillOpacity", 0),
]


def _colour(mode: models.FieldColorModeId) -> builders.FieldColor:
    return builders.FieldColor().mode(mode)


def _stat(panel: Panel) -> stat.Panel:
    made = stat.Panel().unit(panel.unit).no_value(panel.idle).thresholds(_thresholds(panel))
    made.color_scheme(_colour(models.FieldColorModeId.THRESHOLDS))
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    made.color_mode(options.BigValueColorMode.VALUE).graph_mode(options.BigValueGraphMode.NONE)
    named = any("{{" in query.legend for query in panel.queries)
    text = options.BigValueTextMode.VALUE_AND_NAME if named else options.BigValueTextMode.VALUE
    made.text_mode(text)
    if panel.low is not None:
        made.min(panel.low)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    return made


def _heatmap(panel: Panel) -> heatmap.Panel:
    """Return a heat map of a histogram's buckets; more observations are darker."""
    colour = (
        heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").fill("blue")
    )
    colour.scale(HeatmapColorScale.EXPONENTIAL).exponent(0.5).steps(64)
    made = heatmap.Panel().calculate(False).color(colour).cell_gap(1).show_y_histogram()
    made.filter_values(heatmap.FilterValueRange().le(1e-9))
    made.y_axis(heatmap.YAxisConfig().unit("s"))
    return made.cell_values(heatmap.CellValues().unit(panel.unit).decimals(0))


def _states(panel: Panel) -> statetimeline.Panel:
    """Return a timeline of states, where value 0 is the first of ``states``."""
    meaning = {
        str(value): models.ValueMappingResult(text=name, color=colour, index=value)
        for value, (name, colour) in enumerate(panel.states)
    }
    made = statetimeline.Panel().mappings([models.ValueMap(meaning)]).no_value(panel.idle)
    made.color_scheme(_colour(models.FieldColorModeId.THRESHOLDS))
    made.show_value(options.VisibilityMode.AUTO).merge_values(True).fill_opacity(70)
    return made.row_height(0.8).line_width(0)
