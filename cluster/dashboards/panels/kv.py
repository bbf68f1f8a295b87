"""How is KV transferred?"""

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
    "How is KV transferred?",
    stack(
        "KV received",
        "By the role of the receiver and by carrier: decode workers take over prefilled KV,"
        " prefill workers fetch cached blocks of other workers. If grpc is used where tcp or"
        " local is possible, those have failed: `baton status` shows why.",
        (rate(m.WIRE_BYTES, "role", "transport", "codec"), "{{role}}, {{transport}}, {{codec}}"),
    ),
    graph(
        "What the codec saves",
        "Bytes of raw KV over bytes transferred. The codec is chosen for each link: it pays where"
        " the link is slower than the conversion.",
        (_SMALLER, "{{codec}}"),
        decimals=2,
        colours=(),
    ),
    graph(
        "Time of a transfer",
        "Duration of a transfer, from the request to the last frame; it begins while the prompt"
        " is still computed.",
        *quantile_queries(m.TRANSFER),
        colours=palette.QUANTILES,
    ),
    bars(
        "Failed transfers",
        "Each costs a retry or computing the prompt again. If they concern one worker, check that"
        " worker; if all, check the network.",
        (rate(m.FAILURES, "role", "replica"), EACH_WORKER),
    ),
    stack(
        "After the first token",
        "Mean times between the first and second token: wire, until the KV is received; scatter,"
        " until the sequence decodes.",
        *((mean(m.STAGE, match=f'stage="{name}"'), name) for name in ("wire", "scatter")),
        colours=palette.STAGES,
    ),
    graph(
        "Requests at the workers' fronts",
        "On decode workers including requests that are queued or prefilled elsewhere; on prefill"
        " workers the prompts that they compute, or hold until they are fetched.",
        (sum_of(m.DECODE_JOBS), "decode"),
        (sum_of(m.PREFILL_CALLS), "prefill"),
    ),
)


_HITS = rate(m.HITS, "role", match=WORKERS).over(rate(m.QUERIES, "role", match=WORKERS))

MEMORY = row(
    "Is there enough KV memory, and does caching save work?",
    graph(
        "KV pages in use",
        "Pages of running sequences; cached blocks that are not in use count as free. Near 100%,"
        " sequences wait or are preempted.",
        (max_of(m.KV_USAGE, "role", "replica"), EACH_WORKER),
        limits=((0.9, palette.BAD),),
        high=1.0,
    ),
    graph(
        "Preemptions",
        "Preempted sequences, which lost their pages and are computed again. If this is frequent,"
        " the decode pool needs more KV memory or another worker.",
        (rate(m.PREEMPTIONS, "role"), "{{role}}"),
    ),
    graph(
        "Prefix cache hits",
        "Share of the looked-up tokens that were found. It falls if prompts share less, if caches"
        " are too small, and after workers were replaced.",
        (_HITS, "{{role}}"),
        high=1.0,
    ),
)
