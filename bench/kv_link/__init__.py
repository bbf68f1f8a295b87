"""How fast KV moves between two processes, beside bare sockets, gRPC, gloo, memcpy and NIXL."""
