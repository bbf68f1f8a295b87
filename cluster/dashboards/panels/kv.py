"""Does KV get across?"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import palette
from cluster.dashboards.panels.promql import max_of, mean, rate, sum_of
from cluster.dashboards.panels.spec import (
    EACH_WORKER,
    WORKERS,
    bars,
    graph,
    quantile_queries,
    row,
    stack,
)

_SMALLER = rate(m.RAW_BYTES, "codec").over(rate(m.WIRE_BYTES, "codec")).with_unit("suffix:x")

HANDOVER = row(
    "Does KV get across?",
    stack(
        "KV received",
        "By who received it, and by which carrier: decode workers take over what was prefilled,"
        " prefill workers fetch cached blocks of others. grpc where tcp or local could serve means"
        " that those have failed: `baton status` shows why.",
        (rate(m.WIRE_BYTES, "role", "transport", "codec"), "{{role}}, {{transport}}, {{codec}}"),
    ),
    graph(
        "What the codec saves",
        "Bytes of raw KV, to bytes that were carried. The codec is chosen for each link: it pays"
        " where the link is slower than the conversion.",
        (_SMALLER, "{{codec}}"),
        decimals=2,
        colours=(),
    ),
    graph(
        "Time of a transfer",
        "From the pull to the last frame; it begins while the prompt is still computed.",
        *quantile_queries(m.TRANSFER),
        colours=palette.QUANTILES,
    ),
    bars(
        "Transfers that broke",
        "Each costs a retry, or computing the prompt again. Of one worker: look at it; of all:"
        " look at the network.",
        (rate(m.FAILURES, "role", "replica"), EACH_WORKER),
    ),
    stack(
        "After the first token",
        "Mean times between first and second token: wire, until KV has come; scatter, until it"
        " decodes.",
        *((mean(m.STAGE, match=f'stage="{name}"'), name) for name in ("wire", "scatter")),
        colours=palette.STAGES,
    ),
    graph(
        "Requests at the workers' fronts",
        "Those of decode workers, queued and prefilled elsewhere too; prompts that prefill workers"
        " compute, or hold until they are fetched.",
        (sum_of(m.DECODE_JOBS), "decode"),
        (sum_of(m.PREFILL_CALLS), "prefill"),
    ),
)


_HITS = rate(m.HITS, "role", match=WORKERS).over(rate(m.QUERIES, "role", match=WORKERS))

MEMORY = row(
    "Is there memory enough, and does it spare work?",
    graph(
        "KV pages in use",
        "By sequences that run; cached blocks that nobody uses are free. Near 100% sequences wait,"
        " or lose their pages.",
        (max_of(m.KV_USAGE, "role", "replica"), EACH_WORKER),
        limits=((0.9, palette.BAD),),
        high=1.0,
    ),
    graph(
        "Preemptions",
        "Sequences that lost their pages, and are computed again. More than now and then: the"
        " decode pool wants more KV memory, or another worker.",
        (rate(m.PREEMPTIONS, "role"), "{{role}}"),
    ),
    graph(
        "Prefix cache hits",
        "Share of the tokens looked for that were found. It falls when prompts share less, when"
        " caches are too small, and after workers were replaced.",
        (_HITS, "{{role}}"),
        high=1.0,
    ),
)
