"""What both kinds of worker run: model, paged KV pool, block manager, scheduler, sampling.

Knows no network, no Ray and no Redis. The engine is a process of its own (``server``); the front
that speaks for it holds an ``EngineClient`` and stays without torch: ``client``, ``messages``,
``channel``, ``arena``, ``pieces`` and ``config`` import none.
"""
