# SPDX-License-Identifier: Apache-2.0
"""What a dashboard is made of here: values, and one loop that turns them into Grafana's own types.

It knows Grafana and nothing of this package's metrics; `build.py` has the tables.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    heatmap,
    logs,
    loki,
    prometheus,
    stat,
    table,
    tempo,
    timeseries,
)
from grafana_foundation_sdk.builders import (
    common as common_builders,
)
from grafana_foundation_sdk.builders import (
    dashboard as builders,
)
from grafana_foundation_sdk.models import (
    common,
    dashboard,
)
from grafana_foundation_sdk.models import (
    heatmap as heatmap_model,
)
from grafana_foundation_sdk.models import (
    prometheus as model,
)
from grafana_foundation_sdk.models import (
    tempo as tempo_model,
)

COLUMNS = 24
RED, ORANGE, GREEN, NEUTRAL = "red", "orange", "green", "text"

PROMETHEUS = dashboard.DataSourceRef(type_val="prometheus", uid="${metrics}")
TEMPO = dashboard.DataSourceRef(type_val="tempo", uid="${traces}")
LOKI = dashboard.DataSourceRef(type_val="loki", uid="${logs}")


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel: PromQL, TraceQL or LogQL, as the panel's source has it."""

    text: str
    legend: str = ""
    exemplar: bool = False
    instant: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """How a table shows what one query brought, or one label."""

    title: str
    unit: str | None = None
    steps: tuple[tuple[float | None, str], ...] = ()
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: what it shows, and in words what it means and what to do about it."""

    title: str
    about: str
    kind: str
    """`stat`, `lines`, `stacked`, `heatmap`, `bars`, `table`, `traces` or `logs`."""
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    height: int = 8
    steps: tuple[tuple[float | None, str], ...] = ((None, NEUTRAL),)
    """Thresholds: from this value on, this colour; the first from nothing on."""
    show_steps: bool = False
    """Whether the thresholds are drawn as lines."""
    minimum: float | None = 0
    maximum: float | None = None
    decimals: int | None = None
    no_value: str = "no data"
    colours: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of single series, by their legend."""
    dashed: tuple[str, ...] = ()
    """Series that are drawn as an outline, not stacked, by their legend."""
    columns: Mapping[str, Column] = field(default_factory=dict[str, Column])
    """Of a table: what it shows of labels (by name) and queries (`Value #A`, ...), in this order."""
    sort_by: str | None = None
    descending: bool = False
    links: tuple[tuple[str, str], ...] = ()
    """Title and address of links of each value."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice: the values that a label has on a metric."""

    name: str
    label: str
    about: str
    query: str
    multi: bool = True
    all_value: str = ".*"


@dataclass(frozen=True, slots=True)
class Text:
    """A choice that is typed."""

    name: str
    label: str
    about: str
    value: str


@dataclass(frozen=True, slots=True)
class Board:
    uid: str
    title: str
    about: str
    variables: tuple[Variable | Text, ...]
    rows: tuple[Row, ...]
    sources: tuple[str, ...] = ("metrics",)


def dashboard_of(
    board: Board, boards: Sequence[Board], annotations: Mapping[str, str]
) -> dashboard.Dashboard:
    """The dashboard as Grafana keeps it, with ids, positions and links to the other boards."""
    built = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(["torchmem", "gpu", "pytorch"])
        .timezone("browser")
        .time("now-3h", "now")
        .refresh("1m")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .editable()
    )
    for source in board.sources:
        built.with_variable(_SOURCES[source]())
    for variable in board.variables:
        built.with_variable(_variable(variable))
    for other in boards:
        if other.uid != board.uid:
            built.link(
                builders.DashboardLink(other.title)
                .type(dashboard.DashboardLinkType.LINK)
                .url(f"/d/{other.uid}")
                .include_vars(True)
                .keep_time(True)
            )
    for name, expression in annotations.items():
        built.annotation(
            builders.AnnotationQuery()
            .name(name)
            .datasource(PROMETHEUS)
            .enable(True)
            .icon_color(RED)
            .expr(expression)
        )
    number, top = 1, 0
    for row in board.rows:
        built.with_row(builders.Row(row.title).id(number).grid_pos(_place(0, top, COLUMNS, 1)))
        number, top, left, tallest = number + 1, top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            built.with_panel(_panel(panel, number, _place(left, top, panel.width, panel.height)))
            number, left, tallest = number + 1, left + panel.width, max(tallest, panel.height)
        top += tallest
    return built.build()


def _place(left: int, top: int, width: int, height: int) -> dashboard.GridPos:
    return dashboard.GridPos(x=left, y=top, w=width, h=height)


def _source(name: str, label: str, kind: str) -> Callable[[], builders.DatasourceVariable]:
    return lambda: builders.DatasourceVariable(name).label(label).type(kind)


_SOURCES = {
    "metrics": _source("metrics", "Metrics", "prometheus"),
    "traces": _source("traces", "Traces", "tempo"),
    "logs": _source("logs", "Logs", "loki"),
}


def _variable(variable: Variable | Text) -> Any:
    if isinstance(variable, Text):
        return (
            builders.TextBoxVariable(variable.name)
            .label(variable.label)
            .description(variable.about)
            .default_value(variable.value)
            .current(dashboard.VariableOption(text=variable.value, value=variable.value))
        )
    return (
        builders.QueryVariable(variable.name)
        .label(variable.label)
        .description(variable.about)
        .query(variable.query)
        .datasource(PROMETHEUS)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(variable.multi)
        .include_all(True)
        .all_value(variable.all_value)
        .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
    )


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> builders.ThresholdsConfig:
    return (
        builders.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=value, color=colour) for value, colour in steps])
    )


def _panel(panel: Panel, number: int, place: dashboard.GridPos) -> Any:
    built: Any = _KINDS[panel.kind](panel)
    built = (
        built.id(number)
        .title(panel.title)
        .description(panel.about)
        .grid_pos(place)
        .unit(panel.unit)
        .thresholds(_thresholds(panel.steps))
        .no_value(panel.no_value)
        .datasource({"traces": TEMPO, "logs": LOKI}.get(panel.kind, PROMETHEUS))
    )
    if panel.minimum is not None and panel.kind not in ("heatmap", "table", "traces", "logs"):
        built = built.min(panel.minimum)
    if panel.maximum is not None:
        built = built.max(panel.maximum)
    if panel.decimals is not None:
        built = built.decimals(panel.decimals)
    if panel.links:
        built = built.data_links(
            [
                builders.DashboardLink(title).type(dashboard.DashboardLinkType.LINK).url(url)
                for title, url in panel.links
            ]
        )
    for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False):
        built = built.with_target(_target(panel, query, letter))
    return built


def _target(panel: Panel, query: Query, letter: str) -> Any:
    if panel.kind == "traces":
        return (
            tempo.TempoQuery()
            .ref_id(letter)
            .datasource(TEMPO)
            .query_type("traceql")
            .query(query.text)
            .limit(20)
            .table_type(tempo_model.SearchTableType.TRACES)
        )
    if panel.kind == "logs":
        return loki.Dataquery().ref_id(letter).datasource(LOKI).expr(query.text)
    target = (
        prometheus.Dataquery()
        .ref_id(letter)
        .datasource(PROMETHEUS)
        .expr(query.text)
        .editor_mode(model.QueryEditorMode.CODE)
        .exemplar(query.exemplar)
        .legend_format(query.legend or "__auto")
    )
    if panel.kind == "heatmap":
        target = target.format(model.PromQueryFormat.HEATMAP)
    elif panel.kind == "table":
        target = target.format(model.PromQueryFormat.TABLE)
    return target.instant() if query.instant or panel.kind == "table" else target.range()


def _stat(_: Panel) -> Any:
    return (
        stat.Panel()
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    )


def _lines(panel: Panel) -> Any:
    built = (
        timeseries.Panel()
        .draw_style(common.GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(0 if len(panel.queries) > 1 else 10)
        .show_points(common.VisibilityMode.AUTO)
        # A process that is gone leaves a gap, not a line to its successor.
        .span_nulls(False)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(
                common.GraphThresholdsStyleMode.DASHED
                if panel.show_steps
                else common.GraphThresholdsStyleMode.OFF
            )
        )
    )
    for legend, colour in panel.colours.items():
        built = built.override_by_name(legend, [_fixed(colour)])
    for legend in panel.dashed:
        built = built.override_by_name(legend, _OUTLINE)
    return built


def _stacked(panel: Panel) -> Any:
    return (
        _lines(panel)
        .fill_opacity(60)
        .line_width(0)
        .stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    )


def _heatmap(panel: Panel) -> Any:
    return (
        heatmap.Panel()
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit).axis_placement(common.AxisPlacement.LEFT))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_model.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
            .exponent(0.5)
            .scale(heatmap_model.HeatmapColorScale.EXPONENTIAL)
        )
        .exemplars_color("rgba(31, 120, 193, 0.9)")
        .cell_gap(1)
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .mode(common.TooltipDisplayMode.SINGLE)
        .show_y_histogram()
        .show_legend()
    )


def _bars(_: Panel) -> Any:
    return (
        bargauge.Panel()
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .orientation(common.VizOrientation.HORIZONTAL)
        .value_mode(common.BarGaugeValueMode.TEXT)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    )


def _table(panel: Panel) -> Any:
    built = table.Panel().show_header(True).filterable(True)
    order = {name: position for position, name in enumerate(panel.columns)}
    built = built.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    built = built.with_transformation(
        dashboard.DataTransformerConfig(
            id_val="filterFieldsByName", options={"include": {"names": list(panel.columns)}}
        )
    )
    built = built.with_transformation(
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "indexByName": order,
                "renameByName": {name: column.title for name, column in panel.columns.items()},
            },
        )
    )
    for column in panel.columns.values():
        properties: list[dashboard.DynamicConfigValue] = []
        if column.unit is not None:
            properties.append(dashboard.DynamicConfigValue(id_val="unit", value=column.unit))
        if column.decimals is not None:
            properties.append(dashboard.DynamicConfigValue(id_val="decimals", value=column.decimals))
        if column.steps:
            steps = [{"value": value, "color": colour} for value, colour in column.steps]
            properties.append(
                dashboard.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps})
            )
            properties.append(
                dashboard.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"})
            )
        if properties:
            built = built.override_by_name(column.title, properties)
    if panel.sort_by is not None:
        built = built.sort_by(
            [common_builders.TableSortByFieldState().display_name(panel.sort_by).desc(panel.descending)]
        )
    return built


def _traces(_: Panel) -> Any:
    return table.Panel().show_header(True)


def _logs(_: Panel) -> Any:
    return logs.Panel().show_time(True).wrap_log_message(True).enable_log_details(True)


def _fixed(colour: str) -> dashboard.DynamicConfigValue:
    return dashboard.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


_OUTLINE = [
    dashboard.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "outline"}),
    dashboard.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
    dashboard.DynamicConfigValue(id_val="custom.lineWidth", value=2),
    dashboard.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 10]}),
]

_KINDS: Mapping[str, Callable[[Panel], Any]] = {
    "stat": _stat,
    "lines": _lines,
    "stacked": _stacked,
    "heatmap": _heatmap,
    "bars": _bars,
    "table": _table,
    "traces": _traces,
    "logs": _logs,
}
