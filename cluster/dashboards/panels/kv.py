"""Does KV get across?"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import look
from cluster.dashboards.panels.promql import highest, mean, rate, total
from cluster.dashboards.panels.spec import EACH_WORKER, WORKERS, Panel, Query, Row, spread

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


# MERGED cluster.monitoring.dashboards.rows.memory
# Is there memory enough, and does it spare work?

_HITS = rate(m.HITS, "role", match=WORKERS).over(rate(m.QUERIES, "role", match=WORKERS))

MEMORY = Row(
    "Is there memory enough, and does it spare work?",
    (
        Panel(
            "KV pages in use",
            "By sequences that run; cached blocks that nobody uses are free. Near 100% sequences"
            " wait, or lose their pages.",
            (Query(highest(m.KV_USAGE, "role", "replica"), EACH_WORKER),),
            colours=look.ROLES,
            limits=((0.9, look.BAD),),
            high=1.0,
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their pages, and are computed again. More than now and then: the"
            " decode pool wants more KV memory, or another worker.",
            (Query(rate(m.PREEMPTIONS, "role"), "{{role}}"),),
            colours=look.ROLES,
        ),
        Panel(
            "Prefix cache hits",
            "Share of the tokens looked for that were found. It falls when prompts share less,"
            " when caches are too small, and after workers were replaced.",
            (Query(_HITS, "{{role}}"),),
            colours=look.ROLES,
            high=1.0,
        ),
    ),
)
