"""The inference engine that both kinds of worker run, in a process of its own.

It knows no network, no Ray and no Redis. The worker process that speaks for it holds an
``EngineClient`` (engine/process) and imports no torch: engine/ipc, engine/scheduling, and in
engine/process and engine/kv_cache the modules client, session, kv_format, kv_shards and
block_manager.
"""
