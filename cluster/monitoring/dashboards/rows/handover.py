"""Does KV get across?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import mean, rate, total
from cluster.monitoring.dashboards.rows.parts import EACH_WORKER, spread
from cluster.monitoring.dashboards.spec import Panel, Query, Row

_SMALLER = rate(m.RAW_BYTES, "codec").over(rate(m.WIRE_BYTES, "codec")).within("suffix:x")

HANDOVER = Row(
    "Does KV get across?",
    (
        Panel(
            "KV received",
            "On the wire, by who received it: decode workers take over what was prefilled, prefill"
            " workers fetch cached blocks of others.",
            (Query(rate(m.WIRE_BYTES, "role", "codec"), "{{role}}, {{codec}}"),),
            "stack",
            colours=look.ROLES,
        ),
        Panel(
            "What the codec saves",
            "Bytes of KV as it is in the pool, to bytes on the wire. Chosen for each link: a codec"
            " pays where the link is slower than the conversion.",
            (Query(_SMALLER, "{{codec}}"),),
            decimals=2,
        ),
        Panel(
            "Time of a transfer",
            "From the pull to the last frame; it begins while the prompt is still computed.",
            spread(m.TRANSFER),
            colours=look.QUANTILES,
        ),
        Panel(
            "Transfers that broke",
            "Each costs a retry, or computing the prompt again. Of one worker: look at it; of all:"
            " look at the network.",
            (Query(rate(m.FAILURES, "role", "replica"), EACH_WORKER),),
            "bars",
            colours=look.ROLES,
        ),
        Panel(
            "After the first token",
            "Mean times between first and second token: wire, until KV has come; scatter, until"
            " it decodes.",
            tuple(
                Query(mean(m.STAGE, match=f'stage="{name}"'), name) for name in ("wire", "scatter")
            ),
            "stack",
            colours=look.STAGES,
        ),
        Panel(
            "Requests at the workers' fronts",
            "Those of decode workers, queued and prefilled elsewhere too; prompts that prefill"
            " workers compute, or hold until they are fetched.",
            (
                Query(total(m.DECODE_JOBS), "decode"),
                Query(total(m.PREFILL_CALLS), "prefill"),
            ),
            colours=look.ROLES,
        ),
    ),
)
